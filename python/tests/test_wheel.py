"""What the built wheel contains of others: licences, a bill of materials, and no library under the LGPL."""

import json
import re
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel():
    found = sorted((ROOT / "dist").glob("trunkline-*.whl"))
    if not found:
        pytest.skip("there is no wheel in dist; scripts/install_package.sh builds it")
    with zipfile.ZipFile(found[-1]) as opened:
        yield opened


def dist_info(wheel, path):
    """Contents of a file in the wheel's .dist-info."""
    [name] = [name for name in wheel.namelist() if re.fullmatch(rf"trunkline-[^/]*\.dist-info/{path}", name)]
    return wheel.read(name).decode()


def components(wheel):
    bill = json.loads(dist_info(wheel, r"sboms/trunkline\.cdx\.json"))
    assert bill["bomFormat"] == "CycloneDX"
    assert bill["metadata"]["component"]["name"] == "trunkline"
    return {each["name"]: each for each in bill["components"]}


def test_the_bill_of_materials_names_every_component_with_its_version(wheel):
    found = components(wheel)
    assert sorted(found) == ["cli11", "fmt", "isa-l", "liburing", "nanobind", "nlohmann-json", "robin-map"]
    for name, component in found.items():
        assert re.match(r"\d+\.\d+", component["version"]), name
        assert component["licenses"][0]["license"]["id"] in {"MIT", "BSD-3-Clause"}, name


def test_every_component_has_its_licence_in_the_wheel(wheel):
    listed = dist_info(wheel, "METADATA")
    for name, component in components(wheel).items():
        text = dist_info(wheel, rf"licenses/(licenses/)?{re.escape(name)}\.txt")
        assert component["licenses"][0]["license"]["id"] in text.splitlines()[0]
        assert "Copyright" in text
        assert f"License-File: licenses/{name}.txt" in listed
    assert "Apache License" in dist_info(wheel, "licenses/LICENSE")


def test_bundled_libraries_are_in_the_bill_of_materials(wheel):
    of_library = {"libfmt": "fmt", "libisal": "isa-l"}
    bundled = [Path(name).name for name in wheel.namelist() if re.match(r"trunkline\.libs/.+", name)]
    assert {of_library[name.split("-")[0]] for name in bundled} <= set(components(wheel))


def test_libaio_is_neither_linked_in_nor_needed(wheel):
    binaries = [name for name in wheel.namelist() if re.search(r"(_core[^/]*\.so|bin/trunkline)$", name)]
    assert len(binaries) == 2
    for name in binaries:
        contents = wheel.read(name)
        # What both of the library's forms leave: the versions of its symbols, and the name to load.
        assert b"LIBAIO_0." not in contents
        assert b"libaio.so" not in contents


def test_binaries_run_with_the_library_of_gcc_11(wheel):
    for name in wheel.namelist():
        if re.search(r"(_core[^/]*\.so|bin/trunkline)$", name):
            assert b"GLIBCXX_3.4.30" not in wheel.read(name), name


def test_one_wheel_serves_all_pythons_from_3_12_on(wheel):
    [tag] = re.findall(r"^Tag: (cp3\d+)-(\w+)-", dist_info(wheel, "WHEEL"), re.MULTILINE)[:1]
    [module] = [Path(name).name for name in wheel.namelist() if "/_core." in name and name.endswith(".so")]
    if tag[0] in {"cp310", "cp311"}:
        assert tag[1] == tag[0]
        assert module.startswith(f"_core.cpython-{tag[0][2:]}-")
    else:
        assert tag == ("cp312", "abi3")
        assert module == "_core.abi3.so"
