"""Runs Python as `python -c`, `-m` and `python FILE` do, in processes forked from one with torch.

Importing torch takes more than two seconds of processor time, a fork hardly any. Such a process has its own
arguments, environment, working directory and standard streams, and ends as any interpreter does: with exit
handlers, threads and modules. Nothing of trunkline is imported before it starts. Not for tests of the import
of torch, of what the interpreter reads before any code, or of a first line of a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import IO, Any

TORCH = ("torch",)
TORCH_DCP = ("torch", "torch.distributed.checkpoint")
_MOST_BYTES = 1 << 20
_FIELDS = ("command", "directory", "environment")
_servers: dict[tuple[str, ...], socket.socket] = {}
_starting = Lock()


class Process:
    """A process that runs; signal it by its `pid`."""

    def __init__(
        self,
        arguments: Sequence[str | Path],
        *,
        modules: Sequence[str] = TORCH,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: IO[Any],
        stderr: IO[Any],
    ) -> None:
        """Run `python ARGUMENTS`; `modules` are imported already. stdout, stderr: files that are open."""
        self.arguments = [str(each) for each in arguments]
        self.returncode: int | None = None
        fields = (self.arguments, str(cwd or Path.cwd()), dict(os.environ if env is None else env))
        end, theirs = os.pipe()
        self._end = os.fdopen(end)
        with Path(os.devnull).open() as nothing:
            files = [nothing.fileno(), stdout.fileno(), stderr.fileno(), theirs]
            message = json.dumps(dict(zip(_FIELDS, fields, strict=True))).encode()
            with _starting:
                socket.send_fds(_server(tuple(modules)), [message], files)
        os.close(theirs)
        self.pid = int(self._end.readline() or 0)
        assert self.pid, f"the process that has imported {', '.join(modules)} is gone"

    def wait(self, timeout: float = 120) -> int:
        """Return the exit status, negative for a signal. Kills the process when it takes longer."""
        if self.returncode is None:
            if not select.select([self._end], [], [], timeout)[0]:
                os.kill(self.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(self.arguments, timeout)
            self.returncode = int(self._end.readline())
            self._end.close()
        return self.returncode


def run(
    arguments: Sequence[str | Path], *, check: bool = False, timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` to its end, with options as those of Process; with what it prints as text."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = Process(arguments, stdout=stdout, stderr=stderr, **options)
        code = process.wait(timeout)
        texts = [(file.seek(0), file.read())[1] for file in (stdout, stderr)]
    done = subprocess.CompletedProcess(process.arguments, code, *texts)
    if check:
        done.check_returncode()
    return done


def run_ranks(
    arguments: Sequence[str | Path], *, size: int = 2, env: Mapping[str, str] | None = None, **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` on some ranks, whose environment says what torchrun's does of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**(os.environ if env is None else env), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    environment |= {"NODE_RANK": "0", "GROUP_RANK": "0"}
    with ThreadPoolExecutor(size) as pool:
        ranks = [
            pool.submit(run, arguments, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, **options)
            for rank in map(str, range(size))
        ]
    return [rank.result() for rank in ranks]


def _server(modules: tuple[str, ...]) -> socket.socket:
    """Return the connection to the process that has imported the modules, of this process alone."""
    if modules not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)
        command = [sys.executable, __file__, str(theirs.fileno()), *modules]
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        _servers[modules] = ours

        def end() -> None:
            ours.close()
            server.wait()

        atexit.register(end)
    return _servers[modules]


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns in the new processes, with the request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, and that ends this one
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    ends: dict[int, int] = {}
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(ends)
        if requests in ready:
            message, files, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
            if not message:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number, file in enumerate(files[:3]):
                    os.dup2(file, number)
                for file in (*files, *ends.values(), woken, wake):
                    os.close(file)
                requests.close()
                request: dict[str, Any] = json.loads(message)
                return request
            for file in files[:3]:
                os.close(file)
            os.write(files[3], f"{pid}\n".encode())
            ends[pid] = files[3]


def _report_ended(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it
            os.write(ends[pid], f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(ends.pop(pid))


def _become(request: dict[str, Any]) -> Any:
    """Take on what was requested; return what is left to be called: the code itself."""
    command, directory, environment = (request[name] for name in _FIELDS)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    sys.orig_argv = [sys.executable, *command]
    del sys.path[0]  # of this file
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.path.insert(0, "")
        code = compile(command[1], "<string>", "exec")
        return lambda: exec(code, main.__dict__)
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, directory)
        return lambda: runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    main.__file__ = command[0]
    code = compile(Path(command[0]).read_bytes(), command[0], "exec")
    return lambda: exec(code, main.__dict__)


def _main() -> Any:
    for name in sys.argv[2:]:
        __import__(name)
    gc.collect()
    gc.freeze()  # or each process would copy nearly all of it when it ends
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        request = _serve(requests)
    return _become(request)


if __name__ == "__main__":
    _main()()
