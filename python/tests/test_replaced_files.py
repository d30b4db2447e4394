"""A file that is saved over keeps its protection, and one that may not be written is not replaced."""

import errno
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support_users import open_directory, run_as, run_without_privileges

import trunkline as tl

Save = Callable[[dict[str, torch.Tensor], Path], Any]
SAVES: dict[str, tuple[str, Save]] = {
    "pt": ("a.pt", tl.save),
    "safetensors": ("a.safetensors", tl.save),
    "async": ("a.pt", lambda state, path: tl.save_async(state, path).wait()),
    "not durable": ("a.pt", lambda state, path: tl.save(state, path, durable=False)),
}
ACL_ACCESS, ACL_DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="changing owners needs root")


def state(value: int = 1) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1000,), value)}


@pytest.fixture(params=SAVES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[], None]]:
    """A file that was saved once, and what saves over it."""
    name, save = SAVES[request.param]
    path = tmp_path / name
    save(state(1), path)

    def again() -> None:
        save(state(2), path)
        assert torch.equal(tl.load(path)["weight"], state(2)["weight"])
        assert names(tmp_path) == [name]

    return path, again


@pytest.fixture
def place() -> Iterator[Path]:
    with open_directory() as directory:
        yield directory


def names(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir()]


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def acl(*entries: tuple[int, int, int], others: int = 0) -> bytes:
    """An ACL (acl(5)): rw for the owner, r for the group, `entries` (tag, permissions, id), rw as mask."""
    nobody = 0xFFFFFFFF
    every = [(0x01, 6, nobody), *entries, (0x04, 4, nobody), (0x10, 6, nobody), (0x20, others, nobody)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in every)


def set_or_skip(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"no {name} on this filesystem: {error}")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o660, 0o755])
def test_the_mode_stays(saved: tuple[Path, Callable[[], None]], mode: int) -> None:
    path, again = saved
    path.chmod(mode)
    again()
    assert mode_of(path) == mode


def test_setuid_and_setgid_go_as_with_any_write(saved: tuple[Path, Callable[[], None]]) -> None:
    path, again = saved
    path.chmod(0o6755)
    again()
    assert mode_of(path) == 0o755


def test_extended_attributes_and_acls_stay(saved: tuple[Path, Callable[[], None]]) -> None:
    path, again = saved
    set_or_skip(path, "user.origin", b"run 7\0")
    set_or_skip(path, ACL_ACCESS, acl((0x02, 6, 12345)))
    mode = mode_of(path)
    again()
    assert os.getxattr(path, "user.origin") == b"run 7\0"
    assert os.getxattr(path, ACL_ACCESS) == acl((0x02, 6, 12345))
    assert mode_of(path) == mode


def test_a_default_acl_counts_for_new_files_alone(tmp_path: Path) -> None:
    set_or_skip(tmp_path, ACL_DEFAULT, acl((0x02, 6, 12345)))
    plain, new, old = tmp_path / "plain", tmp_path / "new.pt", tmp_path / "old.pt"
    with plain.open("w"):
        pass
    tl.save(state(), new)
    assert mode_of(new) == mode_of(plain)
    assert os.getxattr(new, ACL_ACCESS) == os.getxattr(plain, ACL_ACCESS)
    tl.save(state(), old)
    os.removexattr(old, ACL_ACCESS)
    old.chmod(0o600)
    tl.save(state(), old)
    assert mode_of(old) == 0o600
    assert ACL_ACCESS not in os.listxattr(old)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_file_has_the_mode_that_open_gives(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with (tmp_path / "plain").open("w"):
            pass
        tl.save(state(), tmp_path / "new.pt")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "new.pt") == mode_of(tmp_path / "plain")


@root_only
def test_owner_and_group_stay(saved: tuple[Path, Callable[[], None]]) -> None:
    path, again = saved
    os.chown(path, 12345, 54321)
    path.chmod(0o640)
    again()
    about = path.stat()
    assert (about.st_uid, about.st_gid, mode_of(path)) == (12345, 54321, 0o640)


REFUSED = """
    path = sys.argv[1]
    for save in (tl.save, lambda *which: tl.save_async(*which).wait()):
        torch.save({}, path)
        os.chmod(path, 0o444)
        before = open(path, "rb").read()
        for attempt in (save, lambda state, path: open(path, "wb")):
            try:
                attempt({"weight": torch.ones(9)}, path)
            except PermissionError as error:
                print(error.errno, error.filename)
        assert open(path, "rb").read() == before
        assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
        os.chmod(path, 0o644)
"""


def test_a_file_that_may_not_be_written_is_not_replaced(place: Path) -> None:
    path = place / "a.pt"
    lines = run_without_privileges(REFUSED, path, directory=place).splitlines()
    assert lines == [f"{errno.EACCES} {path}"] * 4


@root_only
@pytest.mark.parametrize("flag", [0x10, 0x20], ids=["immutable", "append only"])
def test_a_file_that_chattr_protects_is_not_replaced(tmp_path: Path, flag: int) -> None:
    path = tmp_path / "a.pt"
    tl.save(state(1), path)
    with path.open("rb") as file:
        try:
            fcntl.ioctl(file, 0x40086602, struct.pack("l", flag))  # FS_IOC_SETFLAGS
        except OSError as error:
            pytest.skip(f"no file attributes on this filesystem: {error}")
        try:
            with pytest.raises(tl.Error, match="cannot save to .*EPERM") as caught:
                tl.save(state(2), path)
        finally:
            fcntl.ioctl(file, 0x40086602, struct.pack("l", 0))
    assert caught.value.errno == errno.EPERM
    assert torch.equal(tl.load(path)["weight"], state(1)["weight"])
    assert names(tmp_path) == ["a.pt"]


def test_a_program_that_runs_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cat.bin"
    found = shutil.which("cat")
    assert found is not None
    shutil.copy(found, path)
    with subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x"  # it runs
        with pytest.raises(tl.Error, match="ETXTBSY"):
            tl.save(state(), path)
        process.stdin.close()
    assert path.read_bytes() == Path(found).read_bytes()


GROUP_WRITABLE = """
    tl.save({"weight": torch.ones(9)}, sys.argv[1])
"""


@root_only
@pytest.mark.parametrize(
    ("mode", "groups", "expected"),
    [
        (0o664, [2002, 2001], (1002, 2001, 0o664)),  # his group: kept
        (0o660, [2002, 2001], (1002, 2001, 0o660)),
        (0o646, [2002], (1002, 2002, 0o644)),  # neither: what group and others both had
        (0o606, [2002], (1002, 2002, 0o600)),
        (0o666, [2002], (1002, 2002, 0o666)),
    ],
)
def test_of_another_users_file_access_is_never_wider(
    place: Path, mode: int, groups: list[int], expected: tuple[int, int, int]
) -> None:
    place.chmod(0o777)
    path = place / "a.pt"
    tl.save(state(), path)
    os.chown(path, 1001, 2001)
    path.chmod(mode)
    run_as(GROUP_WRITABLE, path, user=1002, groups=groups, umask=0)
    about = path.stat()
    assert (about.st_uid, about.st_gid, mode_of(path)) == expected


@root_only
def test_an_acl_that_cannot_be_kept_leaves_nothing_to_others(place: Path) -> None:
    place.chmod(0o777)
    path = place / "a.pt"
    tl.save(state(), path)
    os.chown(path, 1001, 2001)
    # User 1003 is denied what others may: without the entry he would be one of them.
    set_or_skip(path, ACL_ACCESS, acl((0x02, 0, 1003), others=6))
    run_as(GROUP_WRITABLE, path, user=1002, groups=[2002], umask=0)
    assert mode_of(path) == 0o600
    assert ACL_ACCESS not in os.listxattr(path)


def test_links_lead_to_what_is_replaced(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link, target = tmp_path / "link.pt", elsewhere / "target.pt"
    link.symlink_to("elsewhere/target.pt")
    for value in (1, 2):  # created, then replaced
        tl.save(state(value), link)
        assert link.is_symlink()
        assert torch.equal(torch.load(target)["weight"], state(value)["weight"])
        target.chmod(0o600)
    assert mode_of(target) == 0o600
    assert names(elsewhere) == ["target.pt"]
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    with pytest.raises(tl.Error, match="ELOOP"):
        tl.save(state(), tmp_path / "loop.pt")


THROUGH_LINK = """
    here = sys.argv[1]
    os.makedirs(here + "/links"); os.makedirs(here + "/files")
    os.symlink("../files/a.pt", here + "/links/a.pt")
    os.chmod(here + "/links", 0o555)
    tl.save({"weight": torch.ones(9)}, here + "/links/a.pt")
    tl.save({"weight": torch.ones(9)}, here + "/links/a.pt")
    os.chmod(here + "/links", 0o755)
    print(os.listdir(here + "/links"), os.listdir(here + "/files"), os.path.islink(here + "/links/a.pt"))
"""


def test_the_directory_of_a_link_need_not_be_writable(place: Path) -> None:
    printed = run_without_privileges(THROUGH_LINK, place, directory=place)
    assert printed.split("\n")[0] == "['a.pt'] ['a.pt'] True"


def test_of_several_names_one_is_replaced(tmp_path: Path) -> None:
    first, second = tmp_path / "a.pt", tmp_path / "b.pt"
    tl.save(state(1), first)
    os.link(first, second)
    tl.save(state(2), first)
    assert torch.equal(tl.load(first)["weight"], state(2)["weight"])
    assert torch.equal(tl.load(second)["weight"], state(1)["weight"])


def test_the_description_of_a_directory_of_checkpoints_keeps_its_mode(tmp_path: Path) -> None:
    volumes = [tmp_path / "one", tmp_path / "two"]
    for volume in volumes:
        volume.mkdir()
    run = tmp_path / "run"
    tl.Checkpointer(run, volumes=volumes[:1], process_group=False).save(1, {"x": torch.ones(9)}, block=True)
    description = run / "trunkline-checkpoints.json"
    description.chmod(0o600)
    before = description.read_bytes()
    tl.Checkpointer(run, volumes=volumes, process_group=False).save(2, {"x": torch.ones(9)}, block=True)
    assert description.read_bytes() != before
    assert mode_of(description) == 0o600


@pytest.mark.filterwarnings("ignore:torch.distributed is .*single process")
def test_the_manifest_of_torch_distributed_checkpoint_keeps_its_mode(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    where = tmp_path / "sharded"
    for value in (1, 2):
        dcp.save(state(value), storage_writer=tl.dcp.StorageWriter(where, overwrite=True), no_dist=True)
        [manifest] = where.glob("*.manifest")
        if value == 1:
            manifest.chmod(0o600)
    assert mode_of(manifest) == 0o600
