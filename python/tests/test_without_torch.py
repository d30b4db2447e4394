"""Saving and loading arrays where only numpy is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support_numpy_only import NumpyOnly

import trunkline as tl


@pytest.fixture(scope="module")
def numpy_only(tmp_path_factory: pytest.TempPathFactory) -> NumpyOnly:
    return NumpyOnly(tmp_path_factory.mktemp("numpy-only"))


def test_files_of_arrays(numpy_only: NumpyOnly, tmp_path: Path) -> None:
    numpy_only.run(
        """
        import io
        grid = np.arange(12, dtype=np.float32).reshape(3, 4)
        large = np.random.default_rng(0).random((1000, 500))
        arrays = {
            "grid": grid, "large": large, "turned": grid.T, "reversed": grid[::-1], "none": np.zeros((0, 3)),
            "single": np.array(3), "big": grid.astype(">f4"), "bools": grid > 3, "c64": grid.astype("c8"),
            "broadcast": np.broadcast_to(np.arange(3.0), (2, 3)),
        }
        tl.save(arrays, "x.safetensors")
        for options in ({}, {"verify": True}, {"mmap": True}, {"framework": "numpy"}):
            loaded = tl.load("x.safetensors", **options)
            assert loaded.keys() == arrays.keys()
            for name, array in arrays.items():
                assert type(loaded[name]) is np.ndarray and loaded[name].flags.writeable
                assert loaded[name].shape == array.shape and (loaded[name] == array).all(), name
                assert loaded[name].dtype == array.dtype.newbyteorder("=")
        assert list(tl.load("x.safetensors", keys=["grid"])) == ["grid"]
        with tl.open_tensors("x.safetensors") as tensors:
            assert type(tensors["grid"]) is np.ndarray and (tensors["grid"] == grid).all()
            part = tensors.get_slice("large")[3:900:7, 5]
            assert type(part) is np.ndarray and (part == large[3:900:7, 5]).all()
        tl.save_async(arrays, "y.safetensors").wait()
        assert (tl.load("y.safetensors")["large"] == large).all()
        file = io.BytesIO()
        tl.save({"grid": grid}, file, format="safetensors")
        with open("z.safetensors", "wb") as copy:
            copy.write(file.getvalue())
        assert (tl.load("z.safetensors")["grid"] == grid).all()
        """,
        tmp_path,
    )
    stock = pytest.importorskip("safetensors.numpy").load_file(tmp_path / "x.safetensors")
    assert (stock["turned"] == np.arange(12, dtype=np.float32).reshape(3, 4).T).all()


def test_damage_is_found(numpy_only: NumpyOnly, tmp_path: Path) -> None:
    printed = numpy_only.run(
        """
        tl.save({"a": np.zeros(1 << 20), "b": np.ones(3)}, "x.safetensors")
        with open("x.safetensors", "r+b") as file:
            file.seek(5 << 20)
            file.write(b"!")
        print(error_of(tl.load, "x.safetensors"))
        """,
        tmp_path,
    )
    assert printed.startswith("Corrupt: x.safetensors is corrupt: chunk 4 of its data")


def test_errors_say_what_needs_torch(numpy_only: NumpyOnly, tmp_path: Path) -> None:
    printed = numpy_only.run(
        """
        import io
        array = np.zeros(3)
        open("x.pt", "wb").close()
        tl.save({"a": array}, "x.safetensors")
        print(error_of(tl.save, {"a": array}, "new.pt"))
        print(error_of(tl.save, {"a": array}, io.BytesIO()))
        print(error_of(tl.load, "x.pt"))
        print(error_of(tl.open_tensors, "x.pt"))
        print(error_of(tl.load, "x.safetensors", framework="torch"))
        print(error_of(tl.load, "x.safetensors", dtype="float16"))
        print(error_of(tl.load, "x.safetensors", device="cuda"))
        print(error_of(tl.export_checkpoint, "run", "y.safetensors"))
        """,
        tmp_path,
    )
    lines = printed.splitlines()
    assert len(lines) == 8
    for line in lines:
        assert line.startswith("Unsupported: ")
        assert "torch" in line
        assert "not installed" in line
    assert not (tmp_path / "new.pt").exists()


def test_dtypes_that_numpy_lacks(numpy_only: NumpyOnly, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    brain = torch.arange(5).to(torch.bfloat16)
    tl.save({"brain": brain, "other": torch.ones(3)}, tmp_path / "x.safetensors")
    tl.Checkpointer(tmp_path / "run").save(1, {"brain": brain, "other": torch.ones(3)}, block=True)
    numpy_only.without_ml_dtypes()
    printed = numpy_only.run(
        """
        print(error_of(tl.load, "x.safetensors"))
        print(error_of(tl.open_tensors("x.safetensors").__getitem__, "brain"))
        print(error_of(tl.Checkpointer("run").load))
        assert list(tl.load("x.safetensors", keys="other")) == ["other"]
        assert list(tl.Checkpointer("run").load(keys="other")) == ["other"]
        """,
        tmp_path,
    )
    for line in printed.splitlines():
        assert line.startswith("Unsupported: ")
        assert "the tensor 'brain' has the dtype BF16, which numpy lacks; install ml_dtypes" in line
    assert len(printed.splitlines()) == 3
    pytest.importorskip("ml_dtypes")
    numpy_only.with_ml_dtypes()
    numpy_only.run(
        """
        for loaded in (tl.load("x.safetensors"), tl.Checkpointer("run").load()):
            assert loaded["brain"].dtype.name == "bfloat16"
            assert (loaded["brain"].astype(float) == np.arange(5)).all()
        tl.save(loaded, "y.safetensors")
        """,
        tmp_path,
    )
    assert torch.equal(tl.load(tmp_path / "y.safetensors")["brain"], brain)


def test_checkpoints_of_arrays(numpy_only: NumpyOnly, tmp_path: Path) -> None:
    numpy_only.run(
        """
        grid = np.arange(12, dtype=np.float32).reshape(3, 4)
        state = {
            "grid": grid, "part": grid[1:], "turned": grid.T, "reversed": grid[::-1],
            "complex": np.ones(3, complex),
            "large": np.random.default_rng(0).random((1000, 500)), "text": np.array(["x", "yy"]),
            "windows": np.lib.stride_tricks.sliding_window_view(np.arange(10), 3),
            "record": np.zeros(3, dtype=[("x", "f4"), ("y", "i2")]), "empty": np.zeros((3, 0)),
            "values": {
                "step": 3, "list": [1, 2.5, None, (1, 2)], "kind": np.dtype("f4"), "half": np.float16(2),
            },
        }
        with tl.Checkpointer("run", keep=2, keep_best=("loss", "min", 1)) as checkpoints:
            for step in (1, 2, 3, 4):
                checkpoints.save(step, state, metrics={"loss": step})
        checkpoints = tl.Checkpointer("run")
        assert checkpoints.steps() == [1, 3, 4]
        loaded = checkpoints.load()
        assert loaded["values"] == state["values"]
        for name, array in state.items():
            if name != "values":
                assert type(loaded[name]) is np.ndarray and loaded[name].dtype == array.dtype
                assert loaded[name].shape == array.shape and (loaded[name] == array).all(), name
        assert np.shares_memory(loaded["grid"], loaded["part"])
        into = {"grid": np.zeros_like(grid), "record": np.ones(3, dtype=state["record"].dtype)}
        assert checkpoints.load(into=into)["grid"] is into["grid"] and (into["grid"] == grid).all()
        with checkpoints.open_tensors() as tensors:
            assert (tensors.get_slice("large")[2:4] == state["large"][2:4]).all()
            assert (tensors["turned"] == grid.T).all()
        checkpoints.verify()
        checkpoints.save(5, loaded, block=True)
        """,
        tmp_path,
    )
    assert (tl.Checkpointer(tmp_path / "run").load()["turned"].T.ravel() == np.arange(12)).all()


def test_checkpoints_of_torch(numpy_only: NumpyOnly, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.arange(24.0).reshape(4, 6)
    state = {
        "weight": weight,
        "rows": weight[1:3],
        "turned": weight.t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "complex": torch.full((3,), 1 + 2j, dtype=torch.complex128),
        "spread": torch.arange(5).expand(3, 5),
        "every": torch.arange(10)[::2],
        "size": torch.Size([1, 2]),
        "array": np.arange(3),
    }
    tl.Checkpointer(tmp_path / "run").save(1, state, block=True)
    numpy_only.run(
        """
        loaded = tl.Checkpointer("run").load()
        weight = np.arange(24, dtype=np.float32).reshape(4, 6)
        wanted = {
            "weight": weight, "rows": weight[1:3], "turned": weight.T, "parameter": np.ones(2),
            "complex": np.full(3, 1 + 2j), "spread": np.broadcast_to(np.arange(5), (3, 5)),
            "every": np.arange(10)[::2], "array": np.arange(3),
        }
        for name, array in wanted.items():
            assert type(loaded[name]) is np.ndarray, name
            assert loaded[name].shape == array.shape and (loaded[name] == array).all(), name
        assert loaded["size"] == (1, 2)
        into = {"rows": np.zeros((2, 6), np.float32), "parameter": np.zeros(2, np.float32)}
        tl.Checkpointer("run").load(into=into)
        assert (into["rows"] == weight[1:3]).all() and (into["parameter"] == 1).all()
        print(error_of(tl.Checkpointer("run").load, into={"parameter": np.zeros(3, np.float32)}))
        """,
        tmp_path,
    )
