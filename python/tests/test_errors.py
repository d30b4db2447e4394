"""One family of exceptions, with errno, file and message; injected faults arrive as what they are."""

import builtins
import errno
import importlib
import pickle
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_errors import PUBLIC_ERRORS

import trunkline as tl
from trunkline._errors import exception_of, reword


@pytest.mark.parametrize(
    ("kind", "code", "expected"),
    [
        ("system", errno.EIO, (tl.Error, OSError)),
        ("system", errno.ENOENT, (tl.Error, FileNotFoundError)),
        ("system", errno.EEXIST, (tl.Error, FileExistsError)),
        ("system", errno.EACCES, (tl.Error, PermissionError)),
        ("system", errno.EPERM, (tl.Error, PermissionError)),
        ("system", errno.EISDIR, (tl.Error, IsADirectoryError)),
        ("system", errno.ENOTDIR, (tl.Error, NotADirectoryError)),
        ("end_of_file", 0, (tl.EndOfFile,)),
        ("unsupported", errno.EOPNOTSUPP, (tl.Unsupported,)),
        ("cancelled", errno.ECANCELED, (tl.Cancelled,)),
        ("timed_out", errno.ETIMEDOUT, (tl.Timeout, TimeoutError)),
        ("out_of_budget", errno.ENOMEM, (tl.OutOfBudget,)),
        ("corrupt", 0, (tl.Corrupt,)),
        ("format", 0, (tl.Format,)),
        ("closed", errno.EBADF, (tl.Error,)),
    ],
)
def test_kinds(kind: str, code: int, expected: tuple[type[Exception], ...]) -> None:
    error = exception_of(kind, code, "what happened", "/data/file")
    for exception_type in expected:
        assert isinstance(error, exception_type)
    assert isinstance(error, tl.Error)
    assert isinstance(error, OSError)
    assert error.errno == (code or None)
    assert error.strerror == str(error) == "what happened"
    assert error.filename == error.file == "/data/file"
    if isinstance(error, tl.Corrupt):
        error.tensor, error.chunk = "layer.weight", 7
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.errno, copy.strerror, copy.filename) == (error.errno, error.strerror, error.filename)
    assert str(copy) == str(error)
    if isinstance(copy, tl.Corrupt):
        assert (copy.file, copy.tensor, copy.chunk) == ("/data/file", "layer.weight", 7)


def test_every_error_has_a_public_name() -> None:
    """Also classes that only some modules define: a traceback and a pickle name them in the package."""
    for module in ("dcp", "lightning", "transformers", "workload"):
        importlib.import_module(f"trunkline.{module}")
    found: set[type[tl.Error]] = set()
    pending: list[type[tl.Error]] = [tl.Error]
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending.extend(each.__subclasses__())
    assert len(found) > 10
    for each in found:
        assert each.__module__ == "trunkline", each
        assert getattr(tl, each.__qualname__) is each


@pytest.mark.parametrize("name", ["FileNotFoundError", "FileExistsError", "PermissionError"])
def test_errors_of_system_calls_are_named_as_the_builtin_ones(name: str) -> None:
    builtin = getattr(builtins, name)
    code = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EPERM}
    error = exception_of("system", code[builtin], "what happened", "/data/file")
    assert isinstance(error, builtin)
    assert type(error) is getattr(tl, name)
    assert traceback.format_exception_only(error) == [f"trunkline.{name}: what happened\n"]
    everything: dict[str, Any] = {}
    exec("from trunkline import *", everything)
    assert name not in everything


def test_a_corrupt_file_without_details() -> None:
    error = exception_of("corrupt", 0, "a member is missing", "")
    assert isinstance(error, tl.Corrupt)
    assert (error.file, error.tensor, error.chunk) == (None, None, None)


def test_an_invalid_argument_is_a_value_error() -> None:
    error = exception_of("invalid_argument", errno.EINVAL, "lanes: 0", "")
    assert type(error) is ValueError


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EBADF])
@pytest.mark.parametrize("count", [100, 300_000])
def test_injected_errors(new_engine: Callable[..., tl.Engine], tmp_path: Path, code: int, count: int) -> None:
    faults = tl.Faults()
    path = tmp_path / "file"
    with new_engine(faults=faults, block_bytes="64KiB") as engine, tl.open(path, "w", engine=engine) as file:
        file.pwrite(bytes(count))
        faults.fail("write", faults.commands("write"), code, 100)
        faults.fail("read", faults.commands("read"), code, 100)
        for call in (file.pwrite, file.pread):
            with pytest.raises(tl.Error) as caught:
                call(bytearray(count))
            assert caught.value.errno == code
            assert caught.value.filename == str(path)
            assert errno.errorcode[code] in str(caught.value)
            assert str(path) in str(caught.value)
        assert isinstance(file.async_pread(bytearray(count)).exception(), tl.Error)
        assert faults.injected > 0
        assert engine.stats()["errors"] == 3


def test_a_failed_sync_is_final(new_engine: Callable[..., tl.Engine], tmp_path: Path) -> None:
    faults = tl.Faults()
    with new_engine(faults=faults) as engine, tl.open(tmp_path / "file", "w", engine=engine) as file:
        file.pwrite(b"abc")
        faults.fail("sync", 0, errno.EIO)
        for call in (file.sync, file.sync, lambda: file.pwrite(b"x")):
            with pytest.raises(tl.Error) as caught:
                call()
            assert caught.value.errno == errno.EIO


def test_short_transfers_are_resumed(new_engine: Callable[..., tl.Engine], tmp_path: Path) -> None:
    faults = tl.Faults()
    data = bytes(range(256)) * 400
    with new_engine(faults=faults) as engine, tl.open(tmp_path / "file", "w", engine=engine) as file:
        faults.shorten("write", 0, 4096)
        file.pwrite(data)
        faults.shorten("read", faults.commands("read"), "4KiB")
        faults.fail("read", faults.commands("read") + 1, errno.EINTR)
        target = bytearray(len(data))
        file.pread(target)
        assert target == data
        stats = engine.stats()
        assert stats["short_resumes"] >= 2
        assert stats["retries"] >= 1
        assert stats["errors"] == 0


@pytest.mark.parametrize(
    ("call", "exception", "argument"),
    [
        (lambda faults: faults.fail("seek", 0, 5), ValueError, "op"),
        (lambda faults: faults.fail(3, 0, 5), TypeError, "op"),
        (lambda faults: faults.hold("read", -1), ValueError, "first"),
        (lambda faults: faults.shorten("read", 0, "1 parsec"), ValueError, "nbytes"),
        (lambda faults: faults.disturb(1, 1.5, 0), ValueError, "interrupt_rate"),
        (lambda faults: faults.disturb(1, 0, -1), ValueError, "short_rate"),
    ],
)
def test_faults_arguments(call: Callable[[Any], None], exception: type[Exception], argument: str) -> None:
    with pytest.raises(exception, match=f"^{argument}: "):
        call(tl.Faults())


def test_the_error_of_another_rank_is_public() -> None:
    error = tl.RankError(None, "rank 1 failed", None)
    error.rank = 1
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, tl.Error)
    assert (type(copy), copy.rank, str(copy)) == (tl.RankError, 1, "rank 1 failed")
    assert f"{tl.RankError.__module__}.{tl.RankError.__qualname__}" == "trunkline.RankError"


@pytest.mark.parametrize("exception_type", PUBLIC_ERRORS)
def test_a_single_argument_is_the_message(exception_type: type[tl.Error]) -> None:
    """As torch raises the error of a DataLoader's worker again, also through another one's process."""
    once = exception_type("Caught it in worker 0.")
    for error in (once, exception_type(str(once)), pickle.loads(pickle.dumps(once))):
        assert type(error) is exception_type
        assert str(error) == error.strerror == "Caught it in worker 0."
        assert repr(error) == f"{exception_type.__name__}('Caught it in worker 0.')"
        assert error.args == ("Caught it in worker 0.",)
        assert (error.errno, error.filename, error.file) == (None, None, None)
    reword(once, "something else")
    assert str(once) == str(pickle.loads(pickle.dumps(once))) == "something else"
    usual = exception_type(errno.EIO, "a message", "/data/file")
    for error in (usual, pickle.loads(pickle.dumps(usual))):
        assert (error.errno, str(error), error.file) == (errno.EIO, "a message", "/data/file")
    assert str(exception_type()) == ""


def test_a_missing_directory_is_answered_with_how_to_make_it(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    advice = re.escape(f"a parent directory does not exist: create it (mkdir -p {missing})")
    for name in ("state.safetensors", "state.pt"):
        with pytest.raises(tl.FileNotFoundError, match=advice):
            tl.save({"w": torch.zeros(4)}, missing / name)
    with pytest.raises(tl.FileNotFoundError, match=advice):
        tl.open(missing / "file", "w")
    with pytest.raises(tl.FileNotFoundError) as raised:
        tl.open(missing / "file")
    assert "mkdir" not in str(raised.value)
