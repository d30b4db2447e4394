"""tl.data in torch's DataLoader and torchdata's StatefulDataLoader."""

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support_errors import PUBLIC_ERRORS
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import trunkline as tl
from trunkline.data import BatchDataset, Index, Loader, SampleDataset

COUNT = 103

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create . worker processes:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


@pytest.fixture
def rows() -> "numpy.ndarray[Any, Any]":
    return numpy.arange(COUNT * 6, dtype=numpy.int64).reshape(COUNT, 6)


@pytest.fixture
def index(tmp_path: Path, rows: "numpy.ndarray[Any, Any]") -> Index:
    numpy.save(tmp_path / "rows.npy", rows)
    return tl.data.index(tmp_path / "rows.npy")


def first_column(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([int(sample[0]) // 6 for sample in samples])


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def loader_of(index: Index, **options: Any) -> Loader:
    return Loader(index, 8, collate=first_column, workers=1, **options)


@pytest.fixture
def expected(index: Index) -> list[list[list[int]]]:
    """The batches of three epochs."""
    loader = loader_of(index)
    return [lists(loader) for _ in range(3)]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_workers_yields_the_same_batches(
    index: Index, expected: list[list[list[int]]], workers: int
) -> None:
    dataset = BatchDataset(loader_of(index))
    assert len(dataset) == 13
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for epoch in range(3):
        assert lists(loader) == expected[epoch], epoch


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_the_epoch_after_one_that_was_left_is_complete(index: Index, kind: Any) -> None:
    """Workers read ahead: one may have had its last batch already."""
    loader = kind(BatchDataset(loader_of(index)), batch_size=None, num_workers=2, persistent_workers=True)
    reference = loader_of(index)
    for round_, taken in enumerate((1, 9, 10, 13)):
        for number, _ in enumerate(loader, 1):
            if number == taken:
                break
        reference.set_epoch(2 * round_ + 1)
        assert lists(loader) == lists(reference), taken


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_that_end_after_each_epoch(
    index: Index, expected: list[list[list[int]]], context: str
) -> None:
    dataset = BatchDataset(loader_of(index))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert lists(loader) == expected[epoch], epoch


def test_batches_without_collate_cross_processes(index: Index, rows: "numpy.ndarray[Any, Any]") -> None:
    seen = []
    for batch in DataLoader(BatchDataset(Loader(index, 8)), batch_size=None, num_workers=2):
        assert numpy.array_equal(batch.array(numpy.int64), rows[batch.indices])
        seen += batch.indices.tolist()
    assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_stateful_data_loader_goes_on_where_it_was(
    index: Index, expected: list[list[list[int]]], workers: int
) -> None:
    def make() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(BatchDataset(loader_of(index)), batch_size=None, num_workers=workers)

    for batches in (1, 2, 5, 12, 13):
        loader = make()
        iterator = iter(loader)
        seen = [next(iterator).tolist() for _ in range(batches)]
        assert seen == expected[0][:batches]
        state = loader.state_dict()
        del iterator
        again = make()
        again.load_state_dict(state)
        rest = lists(again)
        assert rest == expected[0][batches:], (workers, batches)


def test_samples_of_a_sampler(index: Index, rows: "numpy.ndarray[Any, Any]") -> None:
    dataset = SampleDataset(index)
    assert len(dataset) == COUNT
    assert numpy.array_equal(dataset[7], rows[7])
    assert numpy.array_equal(dataset[-1], rows[-1])
    with pytest.raises(IndexError, match=f"^sample {COUNT} is out of range: there are {COUNT}, numbered"):
        dataset[COUNT]
    with pytest.raises(TypeError, match=r"^index: must be a trunkline\.data\.Index, not Loader$"):
        SampleDataset(Loader(index, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="^sample: must be an integer, not str$"):
        dataset["first"]  # type: ignore[index]
    generator = torch.Generator().manual_seed(2)
    for workers in (0, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # arrays that torch considers not writable
            loader = DataLoader(
                dataset, batch_size=10, shuffle=True, num_workers=workers, generator=generator
            )
            batches = list(loader)
        assert sorted(torch.cat(batches)[:, 0].tolist()) == rows[:, 0].tolist()
    decoded = SampleDataset(index, decode=lambda row: torch.from_numpy(row.copy()).sum())
    assert decoded.__getitems__([3, 5])[1] == rows[5].sum()


def test_labels_of_samples(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "set" / name / f"{number}.bin").write_bytes(f"{name}{number}".encode())
    dataset = SampleDataset(tl.data.index(tmp_path / "set"), decode=bytes, labels=True)
    assert dataset.__getitems__([0, 7]) == [(b"a0", 0), (b"b3", 1)]


class Raising(torch.utils.data.Dataset[Any]):
    """Each sample is an error."""

    def __init__(self, errors: list[tl.Error]) -> None:
        self.errors = errors

    def __getitem__(self, number: int) -> object:
        raise self.errors[number]


@pytest.mark.parametrize("exception_type", PUBLIC_ERRORS)
def test_errors_keep_their_text_in_workers(exception_type: type[tl.Error]) -> None:
    dataset = Raising([exception_type(None, "what failed, and why", "/data/file")])
    loader = DataLoader(dataset, num_workers=1, sampler=[0])
    with pytest.raises(exception_type, match="what failed, and why") as caught:
        list(loader)
    assert type(caught.value) is exception_type


def test_an_error_of_a_batch_dataset_keeps_its_text_in_workers(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(1000))
    dataset = BatchDataset(Loader(tl.data.index(path, record_bytes=10), 10, collate=list, workers=1))
    path.write_bytes(bytes(2000))
    with pytest.raises(tl.Corrupt, match=r"a\.bin has changed since it was indexed"):
        list(DataLoader(dataset, batch_size=None, num_workers=1))
