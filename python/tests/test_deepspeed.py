"""DeepSpeed's interface for I/O: what its users call, and how it takes the place of the compiled ops."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import support_warm
import torch

import trunkline as tl
from trunkline.deepspeed import (
    _operation,
    aio_handle,
    aio_read,
    aio_write,
    deepspeed_memcpy,
    gds_handle,
    pin_handle,
)

SIZES = (1, 511, 4096, 1_000_003)


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.fixture
def handle() -> aio_handle:
    return aio_handle(block_size=1024, queue_depth=2, intra_op_parallelism=2)


def test_parameters_are_returned_as_given() -> None:
    handle = aio_handle(2048, 4, True, True, 3)
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (
        2048,
        4,
        3,
    )
    assert handle.get_single_submit() is handle.get_overlap_events() is True
    assert handle.get_alignment() == 3 * 512
    default = aio_handle()
    assert (default.get_block_size(), default.get_queue_depth()) == (1 << 20, 128)
    for keyword in ("block_size", "queue_depth", "intra_op_parallelism"):
        with pytest.raises(ValueError, match=f"^{keyword}: must be at least 1, not 0"):
            aio_handle(**{keyword: 0})


@pytest.mark.parametrize("size", SIZES)
def test_tensors_of_any_size_are_written_and_read(handle: aio_handle, tmp_path: Path, size: int) -> None:
    path, data = tmp_path / "file", random_bytes(size)
    assert handle.sync_pwrite(data, str(path)) == 1
    assert path.read_bytes() == data.numpy().tobytes()
    assert path.stat().st_mode & 0o777 == 0o600  # as DeepSpeed creates files
    got = torch.zeros_like(data)
    assert handle.sync_pread(got, path, 0) == 1
    assert torch.equal(got, data)


def test_offsets_and_files_that_exist(handle: aio_handle, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    data = random_bytes(3000)
    assert handle.pwrite(data, str(path), True, False, 4096) == 1
    expected = bytes(4096) + data.numpy().tobytes() + bytes(10_000 - 4096 - 3000)
    assert path.read_bytes() == expected  # not truncated
    got = torch.empty(3000, dtype=torch.uint8)
    assert handle.pread(got, str(path), True, file_offset=4096) == 1
    assert torch.equal(got, data)
    assert handle.read(torch.empty(10_000, dtype=torch.uint8), str(path), False) == 0
    assert handle.write(data, str(tmp_path / "new"), True) == 0


def test_wait_counts_operations(handle: aio_handle, tmp_path: Path) -> None:
    data = [random_bytes(size) for size in SIZES]
    for number, each in enumerate(data):
        assert handle.async_pwrite(each, str(tmp_path / str(number))) == 0
    assert handle.wait() == len(data)
    got = [torch.empty_like(each) for each in data]
    for number, each in enumerate(got):
        assert handle.pread(each, str(tmp_path / str(number)), False, **{"async": True}) == 0
    assert handle.wait() == len(data)
    assert all(torch.equal(a, b) for a, b in zip(got, data, strict=True))
    with pytest.raises(RuntimeError, match="^wait: nothing has begun"):
        handle.wait()
    with pytest.raises(TypeError, match="unexpected arguments: wrong"):
        handle.pread(got[0], "x", False, wrong=True)  # type: ignore[call-arg,unused-ignore]


def test_writes_into_open_files(handle: aio_handle, tmp_path: Path) -> None:
    path, data = tmp_path / "file", random_bytes(8192)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        path.unlink()  # the descriptor is all there is
        assert handle.async_pwrite(data, fd, 4096) == 0
        assert handle.async_pwrite(data[:4096], fd=fd) == 0
        assert handle.wait() == 2
        assert os.pread(fd, 20_000, 0) == data[:4096].numpy().tobytes() + data.numpy().tobytes()
    finally:
        os.close(fd)
    with pytest.raises(OSError, match=f"cannot write to the file descriptor {fd}: bad file descriptor"):
        handle.async_pwrite(data, fd)
    with pytest.raises(TypeError, match="pass filename or fd"):
        handle.async_pwrite(data)


def test_only_descriptors_that_are_open_for_writing_are_written_to(
    handle: aio_handle, tmp_path: Path
) -> None:
    path, data = tmp_path / "file", random_bytes(3000)
    path.write_bytes(bytes(3000))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=f"the file descriptor {fd}: it is open for reading only"):
            handle.async_pwrite(data, fd)
        with pytest.raises(TypeError, match="pass filename or fd, not both"):
            handle.async_pwrite(data, str(path), fd=fd)
    finally:
        os.close(fd)
    assert path.read_bytes() == bytes(3000)


def test_a_descriptor_that_may_not_be_opened_again(
    handle: aio_handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str, mode: str) -> None:
        raise PermissionError(13, "permission denied", path)

    monkeypatch.setattr(_operation, "open_file", refused)
    path, data = tmp_path / "file", random_bytes(3000)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        assert handle.async_pwrite(data, fd, 100) == 0
        assert handle.async_pwrite(torch.arange(12.0).reshape(3, 4).t(), fd=fd, file_offset=5000) == 0
    finally:
        os.close(fd)
    assert handle.wait() == 2
    found = path.read_bytes()
    assert found[100:3100] == data.numpy().tobytes()
    assert found[5000:] == torch.arange(12.0).reshape(3, 4).t().contiguous().numpy().tobytes()
    with Path("/dev/full").open("wb") as full:
        handle.async_pwrite(data, full.fileno())
        with pytest.raises(
            OSError, match=f"cannot write to the file descriptor {full.fileno()}: no space left"
        ):
            handle.wait()


@pytest.mark.parametrize("offset", [1.0, "1", None])
def test_offsets_that_are_not_integers_are_named(handle: aio_handle, tmp_path: Path, offset: Any) -> None:
    data, path = torch.zeros(3), tmp_path / "file"
    with Path("/dev/null").open("r+b") as null:
        for act in (
            lambda: handle.sync_pwrite(data, str(path), offset),
            lambda: handle.async_pwrite(data, str(path), offset),
            lambda: handle.async_pwrite(data, null.fileno(), offset),
            lambda: handle.sync_pread(data, str(path), offset),
            lambda: handle.read(data, str(path), False, offset),
        ):
            with pytest.raises(TypeError, match="file_offset: must be an integer of at least 0, not"):
                act()
    with pytest.raises(ValueError, match="file_offset: must be an integer of at least 0, not -1"):
        handle.sync_pwrite(data, str(path), -1)
    assert not path.exists()


def test_tensors_with_strides(handle: aio_handle, tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    handle.sync_pwrite(matrix.t(), str(tmp_path / "file"))
    got = torch.zeros(3, 4)
    handle.sync_pread(got.t(), str(tmp_path / "file"))
    assert torch.equal(got, matrix)
    weight = torch.nn.Parameter(torch.ones(4))
    handle.sync_pwrite(weight, str(tmp_path / "weight"))
    handle.async_pread(weight, str(tmp_path / "weight"))
    assert handle.wait() == 1


def test_errors_name_the_file_and_end_nothing_else(handle: aio_handle, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(100))
    with pytest.raises(tl.EndOfFile, match="short has 100 bytes, which end before byte 150") as caught:
        handle.async_pread(torch.empty(100, dtype=torch.uint8), str(tmp_path / "short"), 50)
    assert caught.value.filename == str(tmp_path / "short")
    with pytest.raises(FileNotFoundError, match="nothing"):
        handle.sync_pread(torch.empty(1), str(tmp_path / "nothing"))
    with pytest.raises(FileNotFoundError, match="cannot make .*/none/file"):
        handle.sync_pwrite(torch.empty(1), str(tmp_path / "none/file"))
    with pytest.raises(RuntimeError, match="nothing has begun"):
        handle.wait()


def test_a_write_that_cannot_be_completed_is_an_error_of_wait(tmp_path: Path) -> None:
    code = (
        "import resource, signal, torch, trunkline as tl\n"
        "from trunkline.deepspeed import aio_handle\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "handle = aio_handle()\n"
        "handle.async_pwrite(torch.zeros(4 << 20, dtype=torch.uint8), 'large')\n"
        "handle.async_pwrite(torch.ones(5000, dtype=torch.uint8), 'small')\n"
        "try:\n"
        "    handle.wait()\n"
        "except OSError as error:\n"
        "    print(type(error).__name__, error.filename, open('small', 'rb').read() == bytes([1]) * 5000)\n"
    )
    done = support_warm.run(["-c", code], cwd=tmp_path, check=True)
    assert done.stdout.split() == ["Error", "large", "True"]


def test_validation_finds_what_differs(handle: aio_handle, tmp_path: Path) -> None:
    path, data = tmp_path / "file", random_bytes(9000)
    handle.pwrite(data, str(path), True, True)
    assert handle._pending[0][0]._future.wait(60)
    path.write_bytes(bytes(9000))
    with pytest.raises(tl.Corrupt, match="file differs from the buffer within 9000 bytes from 0"):
        handle.wait()


@pytest.mark.parametrize("reads", [False, True])
def test_validation_after_a_change_of_the_working_directory(
    reads: bool, handle: aio_handle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = random_bytes(9000)
    if reads:
        Path("file").write_bytes(data.numpy().tobytes())
        handle.pread(torch.empty(9000, dtype=torch.uint8), "file", True, True)
    else:
        handle.pwrite(data, "file", True, True)
    Path("elsewhere").mkdir()
    Path("elsewhere/file").write_bytes(bytes(9000))
    monkeypatch.chdir("elsewhere")
    assert handle.wait() == 1


def test_whole_files(tmp_path: Path) -> None:
    path, data = str(tmp_path / "file"), random_bytes(5000)
    assert aio_write(data, path, 1 << 20, 8, False, True, True) == 0
    got = torch.empty_like(data)
    assert aio_read(got, path, 1 << 20, 8, False, True, True) == 0
    assert torch.equal(got, data)
    with pytest.raises(ValueError, match="has 5000 bytes, and the tensor 4999"):
        aio_read(got[:4999], path, 1 << 20, 8, False, True, False)
    assert deepspeed_memcpy(got, torch.zeros_like(data)) == 0
    assert not got.any()
    with pytest.raises(ValueError, match="dest has 5000 elements, and src 3"):
        deepspeed_memcpy(got, torch.zeros(3))


def test_locked_tensors_are_known_to_all_handles(handle: aio_handle) -> None:
    example = torch.empty(0, dtype=torch.float16)
    tensor = handle.new_cpu_locked_tensor(1000, example)
    assert (tensor.shape, tensor.dtype, bool(tensor.any())) == ((1000,), torch.float16, False)
    assert tensor.data_ptr() % 4096 == 0
    for other in (aio_handle(), pin_handle()):
        assert other.is_pinned(tensor)
        assert other.is_pinned(tensor[100:200])
        assert not other.is_pinned(torch.empty(1000))
    kept = tensor[:10].fill_(7)
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert not handle.is_pinned(tensor)
    assert handle.free_cpu_locked_tensor(tensor) is False
    del tensor
    assert kept.tolist() == [7.0] * 10  # its memory is there as long as a tensor needs it
    forgotten = pin_handle().new_cpu_locked_tensor(1000, example)
    address = forgotten.data_ptr()
    del forgotten
    gc.collect()
    assert pin_handle().free_cpu_locked_tensor_by_ptr(address) is False
    assert pin_handle().new_cpu_locked_tensor(0, example).numel() == 0
    with pytest.raises(ValueError, match="^num_elem: must not be negative"):
        pin_handle().new_cpu_locked_tensor(-1, example)


def test_handles_are_shared_by_threads(handle: aio_handle, tmp_path: Path) -> None:
    data = random_bytes(100_000)
    counts: list[int] = []

    def work(number: int) -> None:
        for round_ in range(10):
            path = str(tmp_path / f"{number}-{round_}")
            counts.append(handle.sync_pwrite(data, path))
            counts.append(handle.sync_pread(torch.empty_like(data), path))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [1] * 80


def test_gpu_tensors_are_refused_where_they_are_none(tmp_path: Path) -> None:
    handle = gds_handle(1024, 2)
    assert handle.sync_pwrite(random_bytes(100), str(tmp_path / "file")) == 1
    with pytest.raises(tl.Unsupported, match="the tensor is on cpu, not on a CUDA GPU"):
        handle.pin_device_tensor(torch.empty(10))
    assert handle.unpin_device_tensor(torch.empty(10)) is False


STAND_IN = {
    "deepspeed/__init__.py": "__version__ = '0.19.8'\nfrom . import ops\n",
    "deepspeed/ops/__init__.py": (
        "from . import op_builder\n"
        "__compatible_ops__ = {'async_io': False, 'pin_memory': False, 'cpu_adam': False}\n"
    ),
    "deepspeed/ops/op_builder/__init__.py": (
        "class OpBuilder:\n"
        "    def load(self, verbose=False): raise RuntimeError('would compile')\n"
        "    def is_compatible(self, verbose=False): return False\n"
        "class AsyncIOBuilder(OpBuilder):\n"
        "    NAME = 'async_io'\n"
        "    def load(self, verbose=False): return super().load(verbose)\n"
        "class GDSBuilder(AsyncIOBuilder):\n"
        "    NAME = 'gds'\n"
        "class PinMemoryBuilder(OpBuilder):\n"
        "    NAME = 'pin_memory'\n"
        "class CPUAdamBuilder(OpBuilder):\n"
        "    NAME = 'cpu_adam'\n"
    ),
    "deepspeed/ops/op_builder/cpu.py": (  # an accelerator without gds
        "from . import AsyncIOBuilder, OpBuilder\n"
        "class NotImplementedBuilder(OpBuilder):\n"
        "    NAME = 'deepspeed_not_implemented'\n"
        "GDSBuilder = UtilsBuilder = NotImplementedBuilder\n"
    ),
}


def run_beside_stand_in(tmp_path: Path, code: str, **environment: str) -> str:
    """Run a program with a package `deepspeed` that has the builders of the real one."""
    for name, text in STAND_IN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_and_uninstall(tmp_path: Path) -> None:
    code = """
import sys, trunkline.deepspeed as ours
import deepspeed.ops.op_builder.cpu
ours.install()
ours.install()
import deepspeed
from deepspeed.ops.op_builder.cpu import UtilsBuilder
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder, GDSBuilder, PinMemoryBuilder
for builder in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder):
    assert builder().load() is ours is builder().load(verbose=True)
assert AsyncIOBuilder().is_compatible()
assert AsyncIOBuilder().is_compatible(verbose=True)  # as ds_report asks
for builder in (CPUAdamBuilder, UtilsBuilder):
    assert not builder().is_compatible()
    try:
        builder().load()
    except RuntimeError as error:
        assert str(error) == 'would compile'
    else:
        raise AssertionError(builder)
assert deepspeed.ops.__compatible_ops__ == {'async_io': True, 'pin_memory': True, 'cpu_adam': False}
ours.uninstall()
ours.uninstall()
assert not AsyncIOBuilder().is_compatible()
assert not any(deepspeed.ops.__compatible_ops__.values())
assert not hasattr(sys, '_deepspeed_pin_memory_op_module')
for builder in (AsyncIOBuilder, GDSBuilder, PinMemoryBuilder):
    try:
        builder().load()
    except RuntimeError as error:
        assert str(error) == 'would compile'
    else:
        raise AssertionError(builder)
ours.install()
assert AsyncIOBuilder().load() is ours
print('good')
"""
    assert run_beside_stand_in(tmp_path, code) == (
        f"async_io: provided by trunkline {tl.__version__} instead of DeepSpeed's own op\ngood\n"
    )


# As accelerate and transformers do when they are imported.
LOOKS = "import importlib.util\nassert importlib.util.find_spec('deepspeed') is not None\n"


@pytest.mark.parametrize("first", ["", "import trunkline\n", "import trunkline.deepspeed\n", LOOKS])
def test_the_environment_installs_it_when_deepspeed_is_imported(tmp_path: Path, first: str) -> None:
    code = (
        f"{first}import sys\n"
        "assert 'deepspeed' not in sys.modules\n"
        "import deepspeed, deepspeed.ops\n"
        "from deepspeed.ops.op_builder import AsyncIOBuilder\n"
        "import trunkline.deepspeed\n"
        "print(AsyncIOBuilder().load() is trunkline.deepspeed)\n"
    )
    assert run_beside_stand_in(tmp_path, code, TRUNKLINE_DEEPSPEED="1") == "True\n"
    code = "import sys, trunkline\nprint('torch' in sys.modules or 'trunkline.deepspeed' in sys.modules)"
    assert run_beside_stand_in(tmp_path, code, TRUNKLINE_DEEPSPEED="1") == "False\n"
    code = "import deepspeed\nprint(deepspeed.ops.op_builder.AsyncIOBuilder().is_compatible())"
    assert run_beside_stand_in(tmp_path, code, TRUNKLINE_DEEPSPEED="0") == "False\n"


def test_without_deepspeed_or_its_builders(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['deepspeed'] = None\nimport trunkline.deepspeed as ours\n"
        "try:\n    ours.install()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = support_warm.run(["-c", code], check=True)
    assert done.stdout.startswith("Unsupported install: cannot import deepspeed")
    code = (
        "import deepspeed.ops.op_builder as b\ndel b.AsyncIOBuilder\nimport trunkline.deepspeed as ours\n"
        "try:\n    ours.install()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    assert "has no AsyncIOBuilder" in run_beside_stand_in(tmp_path, code)
