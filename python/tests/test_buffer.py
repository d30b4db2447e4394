"""Memory of an engine: Buffer, pinned_empty, and torch tensors in it."""

import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trunkline as tl


def test_views_of_a_buffer() -> None:
    buffer = tl.pinned_empty("12KiB")
    assert buffer.nbytes == len(buffer) == 12 << 10
    assert isinstance(buffer.locked, bool)
    assert "nbytes=12288" in repr(buffer)
    view = memoryview(buffer)
    assert view.nbytes == 12 << 10
    assert not view.readonly
    assert view == bytes(12 << 10)
    view[3] = 7
    array = np.frombuffer(buffer, np.uint8)
    assert array[3] == 7
    assert array.ctypes.data % 4096 == 0
    assert torch.from_dlpack(buffer)[3] == 7
    assert np.from_dlpack(buffer)[3] == 7
    assert buffer.__dlpack_device__() == (1, 0)


def test_an_empty_buffer() -> None:
    buffer = tl.pinned_empty(0)
    assert len(buffer) == 0
    assert bytes(memoryview(buffer)) == b""


def test_a_buffer_outlives_its_name() -> None:
    array = np.frombuffer(tl.pinned_empty(4096), np.uint8)
    gc.collect()
    array[:] = 5
    assert array.sum() == 5 * 4096


def test_the_budget_is_hard() -> None:
    with tl.Engine(pinned_budget_bytes="64MiB") as engine:
        taken = engine.stats()["pinned_bytes"]
        buffer: tl.Buffer | None = tl.pinned_empty("32MiB", engine=engine)
        assert engine.stats()["pinned_bytes"] == taken + (32 << 20)
        with pytest.raises(tl.OutOfBudget):
            tl.pinned_empty("60MiB", engine=engine)
        assert buffer is not None
        view: memoryview | None = memoryview(buffer)
        buffer = None
        assert engine.stats()["pinned_bytes"] == taken + (32 << 20)
        view = None
        assert view is None
        assert engine.stats()["pinned_bytes"] == taken


@pytest.mark.parametrize(
    ("wrong", "exception"), [(-1, ValueError), ("much", ValueError), (1.5, TypeError), (None, TypeError)]
)
def test_sizes_are_checked(wrong: Any, exception: type[Exception]) -> None:
    with pytest.raises(exception, match="^nbytes: "):
        tl.pinned_empty(wrong)


def test_devices() -> None:
    assert tl.pinned_empty(1, "cpu").nbytes == 1
    with pytest.raises(tl.Unsupported, match="^device: "):
        tl.pinned_empty(1, "mps")
    with pytest.raises(tl.Unsupported, match="^device: .*(cuda:99|libcuda)"):
        tl.pinned_empty(1, "cuda:99")


def test_direct_transfers_need_no_copy(tmp_path: Path) -> None:
    with tl.Engine() as engine:
        if not engine.explain(tmp_path)["direct"]:
            pytest.skip(f"no direct I/O on {tmp_path}")
        tensor = tl.torch.empty_pinned(1 << 20, torch.uint8, engine=engine)
        with tl.open(tmp_path / "file", "w", engine=engine) as file:
            file.pwrite(tensor)
            file.pread(tensor)
        assert engine.stats()["bytes"] == {"direct": 2 << 20, "bounced": 0, "buffered": 0, "gds": 0}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool], ids=str
)
@pytest.mark.parametrize("shape", [5, (), (3, 4), [2, 0, 7], 0, torch.Size([2, 2])], ids=str)
def test_empty_pinned(dtype: torch.dtype, shape: Any) -> None:
    tensor = tl.torch.empty_pinned(shape, dtype)
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    assert tuple(tensor.shape) == extents
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    if math.prod(extents):
        assert tensor.data_ptr() % 4096 == 0
        assert tensor.reshape(-1).view(torch.uint8).count_nonzero() == 0


def test_empty_pinned_arguments() -> None:
    assert tl.torch.empty_pinned(3).dtype == torch.float32
    with pytest.raises(TypeError, match="^dtype: must be a torch.dtype such as torch.bfloat16, not 'bf16'$"):
        tl.torch.empty_pinned((2, 2), "bf16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^shape: "):
        tl.torch.empty_pinned((2, -1))
    with tl.Engine(pinned_budget_bytes="64MiB") as engine, pytest.raises(tl.OutOfBudget):
        tl.torch.empty_pinned(1 << 28, engine=engine)


def test_pinned_tensors_give_their_memory_back() -> None:
    with tl.Engine() as engine:
        before = engine.stats()["pinned_bytes"]
        tensor = tl.torch.empty_pinned((1024, 1024), engine=engine)
        part = tensor[5:]
        del tensor
        gc.collect()
        assert engine.stats()["pinned_bytes"] == before + (4 << 20)
        del part
        gc.collect()
        assert engine.stats()["pinned_bytes"] == before
