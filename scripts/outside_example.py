"""The library as other projects use it, for scripts/run_tests.py: examples/cpp, copied out of the tree, on an
installed static and shared library (by find_package and by pkg-config), and on sources (by FetchContent and
by CPM).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from results import Outcome

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv/bin/python"
CACHED = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []

# Writes a model of three files, the last one with checksums, and prints what is in it.
WRITE_MODEL = """
import json, sys
from pathlib import Path
import numpy as np, torch, trunkline
from safetensors.numpy import save_file
folder = Path(sys.argv[1])
rng = np.random.default_rng(0)
weights = {
    "a.safetensors": {"embed": rng.random((3000, 700), np.float32), "bias": rng.random(5, np.float32)},
    "b.safetensors": {"head": rng.integers(-9, 9, (1 << 20,), np.int64), "scale": np.array(2, np.float16)},
    "c.safetensors": {"checked": rng.random((1000, 1001), np.float32), "empty": np.zeros((0, 3), np.int8)},
}
for name, tensors in weights.items():
    if name == "c.safetensors":
        trunkline.save({key: torch.from_numpy(value) for key, value in tensors.items()}, folder / name)
    else:
        save_file(tensors, folder / name)
    for key, value in tensors.items():
        print(key, value.nbytes)
        value.tofile(folder / f"{key}.bytes")
names = {key: name for name, tensors in weights.items() for key in tensors}
(folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
"""


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command; its output. Raises RuntimeError with the output if it fails."""
    finished = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
    )
    if finished.returncode != 0:
        raise RuntimeError(f"exit {finished.returncode}: {' '.join(map(str, command))}\n{finished.stdout}")
    return finished.stdout


def build_example(source: Path, build: Path, *options: str) -> None:
    run("cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *CACHED, *options)
    # With these, what one build has compiled is not compiled again by the next, in another folder.
    shared = {"CCACHE_BASEDIR": str(build.parent), "CCACHE_NOHASHDIR": "1"}
    run("cmake", "--build", build, "--target", "roundtrip", "load_model", env=shared)


def run_example(build: Path, scratch: Path, env: dict[str, str] | None = None) -> None:
    run(build / "roundtrip", scratch, env=env)


def build_by_pkg_config(source: Path, prefix: Path, scratch: Path, *options: str) -> None:
    """Compile without CMake: with the flags that pkg-config names for the installed library."""
    env = {"PKG_CONFIG_PATH": str(next(prefix.glob("lib*/**/pkgconfig")))}
    flags = run("pkg-config", "--cflags", "--libs", "trunkline", env=env).split()
    program = scratch / f"by-pkg-config-{prefix.name}"
    run(os.environ.get("CXX", "c++"), "-std=c++23", source / "main.cpp", "-o", program, *flags, *options)
    libraries = next(prefix.glob("lib*/**/pkgconfig")).parent
    run(program, scratch, env={"LD_LIBRARY_PATH": str(libraries)})


def check_install(prefix: Path, library: str) -> None:
    """Raise unless the library, its licences and its bill of materials are installed."""
    if not list(prefix.glob(f"lib*/**/{library}")):
        raise RuntimeError(f"{library} was not installed into {prefix}")
    documents = prefix / "share/doc/trunkline"
    bill = json.loads((documents / "trunkline.cdx.json").read_text())
    for component in bill["components"]:
        if not (documents / "licenses" / f"{component['name']}.txt").is_file():
            raise RuntimeError(f"{documents}/licenses has no licence of {component['name']}")


def check_that_cpm_adds(build: Path) -> None:
    """Raise unless the build got the library from CPM."""
    cache = (build / "CMakeCache.txt").read_text()
    if "CPM_PACKAGES:INTERNAL=trunkline" not in cache:
        raise RuntimeError(f"{build}/CMakeCache.txt names no package trunkline of CPM")


def check_load_model(program: Path, scratch: Path) -> None:
    """Load files that Python's safetensors wrote, and compare every byte by its checksum."""
    model = scratch / "model"
    model.mkdir()
    written = dict(line.split() for line in run(PYTHON, "-c", WRITE_MODEL, model).splitlines())
    loaded = [line.split() for line in run(program, model).splitlines()]
    if {name: size for name, _, size, _ in loaded} != written:
        raise RuntimeError(f"load_model printed {loaded}, but safetensors wrote {written}")
    code = (
        "import sys; from trunkline._core import crc32c\n"
        "print('%08x' % crc32c(open(sys.argv[1], 'rb').read()))"
    )
    for name, _, _, checksum in loaded:
        expected = run(PYTHON, "-c", code, model / f"{name}.bytes").strip()
        if checksum != expected:
            raise RuntimeError(f"load_model read {name} with checksum {checksum} instead of {expected}")
    with (model / "c.safetensors").open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        [byte] = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    damaged = subprocess.run([program, model], capture_output=True, text=True)
    if damaged.returncode != 1 or "c.safetensors is corrupt" not in damaged.stderr:
        raise RuntimeError(f"load_model exited with {damaged.returncode} on a damaged file: {damaged.stderr}")


def can_write_models() -> bool:
    command = (PYTHON, "-c", "import safetensors.numpy, torch, trunkline")
    return PYTHON.exists() and subprocess.run(command, capture_output=True).returncode == 0


def checks(scratch: Path) -> dict[str, Callable[[], None]]:
    """Name each way of using the library; in order, since later ones use what earlier ones built."""
    source = scratch / "source"
    static, shared = scratch / "static", scratch / "shared"

    def installed_static() -> None:
        run("cmake", "--install", ROOT / "build/release", "--prefix", static)
        check_install(static, "libtrunkline.a")
        build_example(source, scratch / "on-static", f"-DCMAKE_PREFIX_PATH={static}")
        run_example(scratch / "on-static", scratch)
        run(static / "bin/trunkline", "--version")

    def without_googletest() -> None:
        build = scratch / "no-googletest"
        configure = ("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON")
        for _ in range(2):
            if "the C++ tests are not built" not in run(*configure):
                raise RuntimeError("nothing said that the C++ tests are not built without GoogleTest")
        if error_of(lambda: run(*configure, "-DTRUNKLINE_TESTS=ON")) is None:
            raise RuntimeError("TRUNKLINE_TESTS=ON was ignored without GoogleTest")

    def installed_shared() -> None:
        build = ROOT / "build/shared"  # beside the release preset's, so that ccache has what that compiled
        options = ("-DBUILD_SHARED_LIBS=ON", "-DTRUNKLINE_TESTS=OFF", f"-DCMAKE_INSTALL_PREFIX={shared}")
        run("cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *CACHED, *options)
        run("cmake", "--build", build)
        run("cmake", "--install", build)
        check_install(shared, "libtrunkline.so")
        run(shared / "bin/trunkline", "--version")
        build_example(source, scratch / "on-shared", f"-DCMAKE_PREFIX_PATH={shared}")
        run_example(scratch / "on-shared", scratch)

    def fetched() -> None:
        # The declaration in examples/cpp, with this tree instead of the repository: no network.
        options = ("-DTRUNKLINE_FETCH=ON", f"-DFETCHCONTENT_SOURCE_DIR_TRUNKLINE={ROOT}")
        build_example(source, scratch / "fetched", *options, "-DTRUNKLINE_WERROR=ON")
        run_example(scratch / "fetched", scratch)

    def added_by_cpm() -> None:
        # The line in examples/cpp and docs/getting-started.md, with this tree instead of the repository.
        cpm = f"-DTRUNKLINE_CPM={ROOT}/tests/cpm/CPM.cmake"
        options = (cpm, f"-DCPM_trunkline_SOURCE={ROOT}", "-DTRUNKLINE_WERROR=ON")
        build_example(source, scratch / "by-cpm", *options)
        check_that_cpm_adds(scratch / "by-cpm")
        run_example(scratch / "by-cpm", scratch)

    return {
        "static, by find_package": installed_static,
        "static, by pkg-config": lambda: build_by_pkg_config(source, static, scratch),
        "shared, by find_package": installed_shared,
        "shared, by pkg-config": lambda: build_by_pkg_config(source, shared, scratch),
        "FetchContent": fetched,
        "CPM": added_by_cpm,
        "configuring without GoogleTest": without_googletest,
    }


def error_of(check: Callable[[], object]) -> str | None:
    try:
        check()
    except RuntimeError as error:
        return str(error)
    return None


def test(scratch: Path) -> Outcome:
    """Run all checks; expects build/release to be built. What fails is printed."""
    outcome = Outcome()
    shutil.copytree(ROOT / "examples/cpp", scratch / "source")
    named = checks(scratch)
    if can_write_models():
        named["a model that safetensors wrote"] = lambda: check_load_model(
            scratch / "on-static/load_model", scratch
        )
    else:
        outcome.skip(
            "example: a model", f"{PYTHON} lacks safetensors or trunkline; run the stage python first"
        )
    for name, check in named.items():
        if error := error_of(check):
            print(error, flush=True)
            outcome.fail(f"example: {name}")
        else:
            print(f"{name}: ok", flush=True)
            outcome.passed += 1
    return outcome
