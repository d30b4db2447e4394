"""Arrays of numpy in .safetensors files, where torch is installed as well."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trunkline as tl

torch = pytest.importorskip("torch")


def test_arrays_and_tensors_are_saved_together(tmp_path: Path) -> None:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    tensors = {
        "tensor": torch.ones(2, dtype=torch.bfloat16),
        "turned": grid.T,
        "reversed": grid[::-1],
        "big": grid.astype(">f4"),
        "fixed": fixed,
        "spread": np.broadcast_to(fixed, (2, 3)),
        "single": np.array(True),
        "none": np.zeros((2, 0)),
    }
    tl.save(tensors, tmp_path / "x.safetensors")
    tl.save_async(tensors, tmp_path / "y.safetensors").wait()
    file = io.BytesIO()
    tl.save(tensors, file, format="safetensors")
    assert file.getvalue() == (tmp_path / "x.safetensors").read_bytes()
    for name in ("x", "y"):
        loaded = tl.load(tmp_path / f"{name}.safetensors", verify=True)
        assert torch.equal(loaded.pop("tensor"), tensors["tensor"])
        for key, tensor in loaded.items():
            assert isinstance(tensor, torch.Tensor)
            assert (tensor.numpy() == tensors[key]).all(), key
            assert tuple(tensor.shape) == tensors[key].shape


@pytest.mark.parametrize("framework", ["numpy", "np"])
def test_tensors_are_loaded_as_arrays(framework: Any, tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    brain = torch.arange(5).to(torch.bfloat16)
    eight = torch.ones(3).to(torch.float8_e5m2)
    tl.save({"grid": torch.ones(2, 3), "brain": brain, "eight": eight}, tmp_path / "x.safetensors")
    loaded = tl.load(tmp_path / "x.safetensors", framework=framework)
    assert all(type(array) is np.ndarray for array in loaded.values())
    assert loaded["brain"].dtype == ml_dtypes.bfloat16
    assert loaded["eight"].dtype == ml_dtypes.float8_e5m2
    assert (loaded["brain"].astype(float) == np.arange(5)).all()
    assert loaded["grid"].shape == (2, 3)
    tl.save(loaded, tmp_path / "y.safetensors")
    again = tl.load(tmp_path / "y.safetensors", framework="pt")
    assert torch.equal(again["brain"], brain)
    assert again["eight"].dtype is torch.float8_e5m2
    half = tl.load(tmp_path / "x.safetensors", framework=framework, dtype="float16", keys="grid")
    assert half["grid"].dtype == np.float16


def test_what_cannot_be_an_array(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(tl.Unsupported, match=r"the tensor 'a' is an array with the dtype <U1"):
        tl.save({"a": np.array(["x"])}, path)
    with pytest.raises(tl.Unsupported, match=r"the tensor 'a' is a masked array; save its filled\(\)"):
        tl.save({"a": np.ma.array([1.0], mask=[True])}, path)
    with pytest.raises(tl.Unsupported, match=r"the tensor 'a' has the dtype torch.complex128"):
        tl.save({"a": np.ones(3, complex)}, path)
    with pytest.raises(TypeError, match=r"obj: 'a' is a list, and a \.safetensors file holds only"):
        tl.save({"a": [1]}, path)
    assert not path.exists()
    tl.save({"a": torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, path)
    with pytest.raises(tl.Unsupported, match=r"the tensor 'a' has the dtype F4, which numpy lacks"):
        tl.load(path, framework="numpy")
    with pytest.raises(ValueError, match=r'framework: must be "torch"'):
        tl.load(path, framework="jax")  # type: ignore[call-overload]
    tl.save({"a": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"framework: .*x.pt is a .pt file"):
        tl.load(tmp_path / "x.pt", framework="numpy")
