"""What src/device declares of the CUDA driver and of cuFile, beside NVIDIA's own headers and libraries.

The declarations are written by hand, so that building needs no CUDA. scripts/setup.sh installs the headers
(requirements/nvidia.txt) into a folder that nothing is loaded from.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECK = ROOT / "tests" / "nvidia_headers" / "check.cpp"
INSTALLED = Path(sys.prefix) / "nvidia" / "nvidia"
VERSIONS = {
    "12": (INSTALLED / "cuda_runtime", INSTALLED / "cufile"),
    "13": (INSTALLED / "cu13", INSTALLED / "cu13"),
}
FOUND = re.compile(r"\bfind\((?:driver\.)?api\.(\w+), \"(\w+)\"\)")


def symbols(source: str) -> dict[str, str]:
    """The symbol that src/device/`source` looks for, by the field that it is kept in."""
    found = dict(FOUND.findall((ROOT / "src" / "device" / source).read_text()))
    assert len(found) >= 10
    return found


CUDA = symbols("cuda/api.cpp")
CUFILE = symbols("gds/api.cpp")


def compiled(folder: Path, version: str, change: tuple[str, str] = ("", "")) -> tuple[int, str]:
    """Compile the comparison, with a line of the declarations changed; return status and errors."""
    runtime, cufile = VERSIONS[version]
    if not (runtime / "include" / "cuda.h").exists() or not (cufile / "include" / "cufile.h").exists():
        pytest.skip(
            f"the headers of CUDA {version} are not in {INSTALLED}: scripts/setup.sh test installs them"
        )
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    lines = [f"SAME(cuda::Api, {field}, {symbol});" for field, symbol in CUDA.items()]
    lines += [f"SAME(cufile::Api, {field}, {symbol});" for field, symbol in CUFILE.items()]
    (folder / "functions.h").write_text("\n".join(lines) + "\n")
    for header in ("cuda/api.h", "gds/api.h"):
        declared = (ROOT / "src" / "device" / header).read_text()
        copy = folder / "device" / header
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(declared.replace(*change) if change[0] in declared else declared)
    places = [folder, ROOT / "include", ROOT / "src", CHECK.parent]
    result = subprocess.run(
        [compiler, "-std=c++23", "-fsyntax-only", *(f"-I{place}" for place in places)]
        + [f"-isystem{place / 'include'}" for place in (runtime, cufile)]
        + [str(CHECK)],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_declarations_are_those_of_nvidia(tmp_path: Path, version: str) -> None:
    assert compiled(tmp_path, version) == (0, "")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("Code (*MemFree)(DevicePointer memory)", "Code (*MemFree)(void* memory)"), "cuMemFree_v2"),
        (
            ("(*DeviceTotalMem)(std::size_t* bytes", "(*DeviceTotalMem)(unsigned* bytes"),
            "cuDeviceTotalMem_v2",
        ),
        (
            ("(*EventSynchronize)(Event event)", "(*EventSynchronize)(Event event, int more)"),
            "cuEventSynchronize",
        ),
        (("compute_major = 75", "compute_major = 74"), "compute_major"),
        (("kAlreadyOpen = 5026", "kAlreadyOpen = 5027"), "kAlreadyOpen"),
        (("unsigned minor_version;", "unsigned long minor_version;"), "minor_version"),
        (
            (
                "off_t* memory_offset, ssize_t* moved, cuda::Stream stream);\n  Outcome (*Write",
                "int memory_offset, ssize_t* moved, cuda::Stream stream);\n  Outcome (*Write",
            ),
            "cuFileReadAsync",
        ),
    ],
)
def test_a_wrong_declaration_is_found(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    status, errors = compiled(tmp_path, "12", change)
    assert status != 0
    assert complaint in errors


@pytest.mark.parametrize("version", VERSIONS)
def test_libcufile_has_every_symbol(version: str) -> None:
    library = VERSIONS[version][1] / "lib" / "libcufile.so.0"
    nm = shutil.which("nm")
    if nm is None or not library.exists():
        pytest.skip(f"{library} is not there, or no nm: scripts/setup.sh test installs it")
    listed = subprocess.run([nm, "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    exported = {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    assert set(CUFILE.values()) <= exported
