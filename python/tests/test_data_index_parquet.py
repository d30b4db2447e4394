"""tl.data.index of Parquet files."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import sample_files

import trunkline as tl


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_row_groups_are_tables(tmp_path: Path, compression: str) -> None:
    first = sample_files.parquet(tmp_path / "a.parquet", 3, compression=compression)
    second = sample_files.parquet(tmp_path / "b.parquet", 2, 70, compression=compression)
    index = pickle.loads(pickle.dumps(tl.data.index(tmp_path)))
    assert (len(index), index.format, index._ranges_per_sample) == (5, "parquet", 1)
    expected = [
        *(first.slice(100 * each, 100) for each in range(3)),
        second.slice(0, 70),
        second.slice(70, 70),
    ]
    for sample, table in enumerate(expected):
        seen = sample_files.view(index, sample)
        assert isinstance(seen, pyarrow.Table)
        assert seen.equals(table)


@pytest.mark.parametrize(
    ("columns", "ranges"),
    [
        (["value"], 1),
        (["id", "value"], 2),
        (["text", "list"], 1),
        (["struct"], 1),
        (["list", "id", "value"], 3),
    ],
)
def test_only_the_chosen_columns_are_read(tmp_path: Path, columns: list[str], ranges: int) -> None:
    table = sample_files.parquet(tmp_path / "a.parquet", 3)
    index = tl.data.index(tmp_path, columns=columns)
    assert (len(index), index._ranges_per_sample) == (3, ranges)
    assert index._lengths is not None
    whole = tl.data.index(tmp_path)
    assert int(index._lengths.sum()) < int(whole._lengths.sum())  # type: ignore[union-attr]
    for sample in range(3):
        seen = sample_files.view(index, sample)
        assert isinstance(seen, pyarrow.Table)
        assert seen.equals(table.select(seen.column_names).slice(100 * sample, 100))
        assert sorted(seen.column_names) == sorted(columns)
    assert whole.fingerprint != index.fingerprint


def test_unknown_columns_are_named(tmp_path: Path) -> None:
    sample_files.parquet(tmp_path / "a.parquet", 1)
    with pytest.raises(ValueError, match=r"no column 'ids'; it has id, text, list, struct, value"):
        tl.data.index(tmp_path, columns=["ids"])


def test_files_of_other_columns_are_an_error(tmp_path: Path) -> None:
    sample_files.parquet(tmp_path / "a.parquet", 2)
    pyarrow.parquet.write_table(pyarrow.table({"id": numpy.arange(3)}), tmp_path / "b.parquet")
    with pytest.raises(tl.Format, match=r"b\.parquet: has other columns than .*a\.parquet"):
        tl.data.index(tmp_path, cache=None)
    assert len(tl.data.index(tmp_path, cache=None, on_error="skip")) == 2
    assert len(tl.data.index(tmp_path, cache=None, columns=["id"])) == 3


@pytest.mark.parametrize("size", [0, 3, 100, -1, -20])
def test_damaged_footers_are_noticed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.parquet"
    sample_files.parquet(path, 2)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(tl.Format, match=r"a\.parquet: its Parquet footer"):
        tl.data.index(tmp_path, cache=None)
    sample_files.parquet(tmp_path / "b.parquet", 1)
    index = tl.data.index(tmp_path, cache=None, on_error="skip")
    assert (len(index), len(index.skipped)) == (1, 1)


def test_a_row_group_that_cannot_be_decoded_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    sample_files.parquet(path, 2)
    index = tl.data.index(tmp_path)
    data = bytearray(path.read_bytes())
    begin = int(index._offsets[1])  # type: ignore[index]
    data[begin : begin + 100] = bytes(100)
    path.write_bytes(data)
    with pytest.raises(tl.Corrupt, match=r"a\.parquet: row group 1 cannot be decoded"):
        sample_files.view(index, 1)


def test_ranges_of_another_file_are_an_error(tmp_path: Path) -> None:
    sample_files.parquet(tmp_path / "a.parquet", 2)
    index = tl.data.index(tmp_path)
    sample_files.parquet(tmp_path / "a.parquet", 2, 5000)
    with pytest.raises(tl.Corrupt, match=r"a\.parquet"):
        sample_files.view(index, 1)


def test_without_pyarrow_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_files.parquet(tmp_path / "a.parquet", 1)
    hidden: dict[str, Any] = {name: None for name in sys.modules if name.partition(".")[0] == "pyarrow"}
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    with pytest.raises(ImportError, match="pip install pyarrow"):
        tl.data.index(tmp_path, cache=None)


def test_an_index_of_parquet_files_is_kept(tmp_path: Path) -> None:
    sample_files.parquet(tmp_path / "a.parquet", 2)
    one = tl.data.index(tmp_path, columns=["id", "value"])
    again = tl.data.index(tmp_path, columns=["id", "value"])
    assert again._info == one._info
    assert (again._offsets == one._offsets).all()
    assert len(list(tmp_path.glob(".trunkline-index-*"))) == 1
    assert isinstance(sample_files.view(again, 1), pyarrow.Table)


def test_checksums_of_pages_are_verified(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"x": numpy.arange(1000)})
    pyarrow.parquet.write_table(
        table, path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    index = tl.data.index(path, cache=None)
    data = bytearray(path.read_bytes())
    data[int(index._lengths[0]) - 100] ^= 1  # type: ignore[index]
    path.write_bytes(data)
    with pytest.raises(tl.Corrupt, match=r"a\.parquet: row group 0 cannot be decoded"):
        sample_files.view(index, 0)
