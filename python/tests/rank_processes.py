"""Ranks in processes of their own, forked from one that has imported torch, and told what to do."""

import contextlib
import ctypes
import errno
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import trunkline as tl
from trunkline import _core
from trunkline._tensor_io.background import start_thread
from trunkline.checkpoint.directory.local_save import LocalSave
from trunkline.checkpoint.directory.step_save import StepSave
from trunkline.checkpoint.nodes.node_directory import NodeDirectory
from trunkline.checkpoint.ranks.attempts import Attempts
from trunkline.checkpoint.ranks.group import Exchange, Exchanges, GroupRanks
from trunkline.checkpoint.save import SaveHandle

REPLY_SECONDS = 60.0

# Where a save can be cut short: before and after each thing that others can see of it.
PHASES = ("begin", "placed", "writing", "durable", "reported", "commit", "committed")

# The same for nodes with disks of their own: each before or after a durable write of one of them.
LOCAL_PHASES = ("placed", "writing", "durable", "prepare", "prepared", "mark", "marked")


def make_state(seed: int, kilobytes: int = 3000, tensors: int = 3) -> dict[str, Any]:
    """A state that is the same on all ranks: tensors of so many kilobytes each, and a few values."""
    generator = torch.Generator().manual_seed(seed)
    model = {
        f"layer{i}": torch.randint(0, 256, (kilobytes, 1024), dtype=torch.uint8, generator=generator)
        for i in range(tensors)
    }
    return {"model": model, "bias": torch.arange(seed, seed + 10), "seed": seed, "list": [1.5, None, "x"]}


def same(state: Any, expected: Any) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(expected, torch.Tensor):
        return isinstance(state, torch.Tensor) and torch.equal(state, expected)
    if isinstance(expected, dict):
        return list(state) == list(expected) and all(same(state[key], expected[key]) for key in expected)
    return bool(state == expected)


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the texts of all warnings of the block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in said]


class Rank:
    """What a rank can be told to do."""

    def __init__(self, rank: int, size: int, host: str, port: int) -> None:
        self.rank = rank
        self.faults = tl.Faults()
        self.engine = tl.Engine("threads", faults=self.faults, block_bytes="256KiB", queue_depth=4)
        # As torchrun: the store is in another process; or in rank 0.
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            world_size=size,
            is_master=host == "rank 0" and rank == 0,
            timeout=timedelta(seconds=REPLY_SECONDS),
            wait_for_workers=False,
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self.checkpointers: dict[str, tl.Checkpointer] = {}
        self.sharded_calls: Any = None
        self.groups: dict[tuple[int, ...], Any] = {}
        self.reads = threading.Event()

    def set_environment(self, **variables: str) -> None:
        os.environ.update(variables)

    def change_directory(self, directory: str) -> None:
        os.chdir(directory)

    def make_group(self, ranks: list[int], seconds: float = REPLY_SECONDS) -> None:
        self.groups.setdefault(tuple(ranks), dist.new_group(ranks, timedelta(seconds=seconds)))

    def open(self, directory: str, name: str = "", group: Any = None, **options: Any) -> list[int]:
        if group is not None:
            group = self.groups[tuple(group)]
        made = tl.Checkpointer(directory, process_group=group, engine=self.engine, **options)
        self.checkpointers[name] = made
        return made.steps()

    def open_until_interrupted(self, directory: str, seconds: float) -> bool:
        """Open while other ranks do not, and press Ctrl-C after a while; whether that ended it."""
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            tl.Checkpointer(directory, engine=self.engine)
        except KeyboardInterrupt:
            return True
        return False

    def set_timeout(self, timeout: float) -> None:
        for made in self.checkpointers.values():
            made._ranks._exchanges.timeout = timeout  # type: ignore[attr-defined]

    def save(
        self,
        step: Any,
        state: Any,
        block: bool = False,
        name: str = "",
        metrics: dict[str, float] | None = None,
    ) -> None:
        """Begin to save; with `block` to the end."""
        state = make_state(**state) if isinstance(state, dict) and "seed" in state else state
        self.checkpointers[name].save(step, state, block=block, metrics=metrics)

    def cancel(self, name: str = "") -> None:
        """Cancel the save that was begun last, and wait for it."""
        handle = self.checkpointers[name]._last
        assert handle is not None
        handle.cancel()
        handle.wait()

    def cancel_late(self) -> None:
        """Cancel the save that was begun last once it is over, and wait as if nothing were known of that."""
        handle = self.checkpointers[""]._last
        assert handle is not None
        handle._join()
        handle.cancel()
        self.checkpointers[""].wait()

    def cancelled_save(self, step: int, state: Any) -> None:
        """Begin to save in the background, and cancel that at once."""
        self.save(step, state)
        self.cancel()

    def save_until_ctrl_c(self, step: int, state: Any) -> bool:
        """Save, with what poses as Ctrl-C once the save waits for other ranks; whether that ended it."""
        waits, meet, wait = threading.Event(), Exchange.meet, SaveHandle._wait_for_end

        def meeting(exchange: Exchange) -> Any:
            waits.set()
            return meet(exchange)

        def interrupted(handle: SaveHandle) -> None:
            assert waits.wait(REPLY_SECONDS)
            raise KeyboardInterrupt

        Exchange.meet, SaveHandle._wait_for_end = meeting, interrupted  # type: ignore[method-assign]
        try:
            self.save(step, state, block=True)
        except KeyboardInterrupt:
            return True
        finally:
            Exchange.meet, SaveHandle._wait_for_end = meet, wait  # type: ignore[method-assign]
        return False

    def save_until_it_looks(self, step: int, state: Any) -> None:
        """Begin to save in the background; return once that has looked for other ranks twice."""
        attempts = self.checkpointers[""]._ranks._exchanges.attempts  # type: ignore[attr-defined]
        pending, looks, looked = attempts.pending, itertools.count(), threading.Event()

        def watched(rank: int) -> Any:
            if next(looks) > 0:
                looked.set()
            return pending(rank)

        attempts.pending = watched
        try:
            self.save(step, state)
            assert looked.wait(REPLY_SECONDS)
        finally:
            attempts.pending = pending

    def save_object(self, step: int) -> None:
        self.checkpointers[""].save(step, {"object": object()})

    def wait(self, name: str = "") -> None:
        self.checkpointers[name].wait()

    def wait_drained(self, name: str = "") -> None:
        self.checkpointers[name].wait_drained()

    def steps(self, name: str = "") -> list[int]:
        return self.checkpointers[name].steps()

    def interrupted_save(self, step: int, event: int) -> bool:
        """Save, while a signal handler raises at the line of this number; whether there are so many."""
        raised = False

        def trace(frame: Any, what: str, _: Any) -> Any:
            nonlocal event, raised
            if frame.f_code not in _BEGINNING:
                return None
            if what in ("line", "return"):
                event -= 1
                if event < 0 and not raised:
                    raised = True
                    raise Interrupted
            return trace

        sys.settrace(trace)
        try:
            self.checkpointers[""].save(step, make_state(step, 1), block=True)
        except Interrupted:
            pass
        except tl.Error:  # no other rank joins it
            assert not raised
        finally:
            sys.settrace(None)
        return raised

    def loads(self, state: Any, step: int | None = None, name: str = "") -> bool:
        return same(self.checkpointers[name].load(step), make_state(**state))

    def latest_loaded(self) -> Any:
        return self.checkpointers[""].load()["seed"]

    def latest_loaded_number(self) -> Any:
        return self.checkpointers[""].load()["number"]

    def fail_to_open_manifests(self) -> None:
        """This rank does not find what the others do, as with a network filesystem that is behind."""
        made = self.checkpointers[""]
        made._context.store = _Failing(made._context.store, "open_manifest")

    def save_many(self, steps: Iterable[int], kilobytes: int) -> None:
        """Save without ever waiting; change the tensors as soon as that is allowed."""
        for step in steps:
            state = make_state(step, kilobytes)
            handle = self.checkpointers[""].save(step, state)
            handle.wait_staged()
            for tensor in state["model"].values():
                tensor.zero_()
        self.checkpointers[""].wait()

    def save_then_destroy_group(self, step: int, state: Any) -> None:
        self.checkpointers[""].save(step, make_state(**state))
        dist.destroy_process_group()

    def hold_writes(self) -> None:
        self.faults.hold("write", self.faults.commands("write"), 1000)
        # Also while it is told to do something else.
        signal.signal(signal.SIGUSR1, lambda *_: self.faults.release())

    def release(self) -> None:
        self.faults.release()

    def fail_writes(self, code: int) -> None:
        self.faults.fail("write", self.faults.commands("write"), code, 1000)

    def destroy_group(self, await_store: bool = False) -> bool:
        """Destroy the process group; whether that ends its store."""
        store = weakref.ref(_get_default_store())
        self.groups.clear()  # each would keep it
        dist.destroy_process_group()
        deadline = time.monotonic() + REPLY_SECONDS
        while await_store and store() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        return store() is None

    def fails_to_read(self, step: int | None = None) -> bool:
        """Load from a disk that fails meanwhile; whether that raised an error of the disk."""
        self.faults.fail("read", self.faults.commands("read"), errno.EIO)
        try:
            self.checkpointers[""].load(step)
        except tl.Error as error:
            return error.errno == errno.EIO
        return False

    def interrupted_load(self) -> bool:
        """Load, and be interrupted when all ranks have agreed on a checkpoint; whether that ended it."""
        made = self.checkpointers[""]
        agree = made._agree

        def interrupted(*arguments: Any, **keywords: Any) -> Any:
            agree(*arguments, **keywords)
            raise KeyboardInterrupt

        made._agree = interrupted  # type: ignore[method-assign]
        try:
            made.load()
        except KeyboardInterrupt:
            return True
        finally:
            made._agree = agree  # type: ignore[method-assign]
        return False

    def fail_syncs(self, code: int) -> None:
        self.faults.fail("sync", self.faults.commands("sync"), code, 1000)

    def fail_retention(self) -> None:
        """The next removal of old checkpoints fails."""
        for made in self.checkpointers.values():
            made._context.store = _Failing(made._context.store, "retain")

    def replaced_before_opening(self, directory: str, step: int, times: int) -> None:
        """Let another job replace a step each time before this rank opens its manifest."""
        made = self.checkpointers[""]
        made._context.store = _Replaced(made._context.store, directory, step, times)

    def saved_before_looking(self, directory: str, step: int) -> None:
        """Let another job save before this rank looks for its last checkpoint."""
        made = self.checkpointers[""]
        made._context.store = _Extended(made._context.store, directory, step)

    def look_into(self, directory: str) -> None:
        """Find other checkpoints than the other ranks, as where the directory is not mounted."""
        self.checkpointers[""]._context.store = _core.CheckpointStore(directory)

    def verify_while_removed(self, directory: str, step: int) -> None:
        """Verify the last checkpoint, which another job removes before its manifest is opened."""
        made = self.checkpointers[""]
        made._context.store = _Removed(made._context.store, directory, step)
        made.verify()

    def slow_to_read(self, topic: str, seconds: float) -> None:
        """Look for a message only after a while."""
        read = Exchange.read

        def late(exchange: Exchange, what: str, rank: int) -> Any:
            if what == topic:
                time.sleep(seconds)
            return read(exchange, what, rank)

        Exchange.read = late  # type: ignore[method-assign]

    def watch_reads(self, topic: str) -> None:
        """Have await_read() wait until a save waits for a message."""
        read, self.reads = Exchange.read, threading.Event()

        def seen(exchange: Exchange, what: str, rank: int) -> Any:
            if what == topic:
                self.reads.set()
            return read(exchange, what, rank)

        Exchange.read = seen  # type: ignore[method-assign]

    def await_read(self) -> None:
        assert self.reads.wait(REPLY_SECONDS)

    def collective(self) -> int:
        """A collective of the user's own."""
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return int(tensor.item())

    def monitored_barrier(self) -> None:
        """A barrier that rank 0 counts differently."""
        dist.monitored_barrier()

    def open_local(self, directory: str, **options: Any) -> list[int]:
        made = tl.Checkpointer(directory, local=True, engine=self.engine, **options)
        self.checkpointers[""] = made
        return made.steps()

    def sharded(self, what: str, *arguments: Any, warns: bool = False, **options: Any) -> Any:
        """Do something of ShardedCalls; `warns`: return the texts of its warnings."""
        if self.sharded_calls is None:
            from sharded_states import ShardedCalls

            self.sharded_calls = ShardedCalls(self.engine)
        with recorded_warnings() if warns else contextlib.nullcontext([]) as said:
            value = getattr(self.sharded_calls, what)(*arguments, **options)
        return said if warns else value

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call a method of the Checkpointer that returns a value."""
        return getattr(self.checkpointers[""], what)(*arguments)

    def open_local_warns(self, directory: str, **options: Any) -> list[str]:
        """Open a directory; return what it warns of."""
        with recorded_warnings() as said:
            self.open_local(directory, **options)
        return said

    def load_warns(self, state: Any) -> list[str]:
        """Load the latest step, which must be this state; return what it warns of."""
        with recorded_warnings() as said:
            assert self.loads(state)
        return said

    def save_warns(self, step: int, state: Any, altered: bool = False) -> list[str]:
        """Save a state, with one bit of a tensor changed if it is `altered`; return what it warns of."""
        made = make_state(**state)
        if altered:
            made["model"]["layer1"][350, 17] ^= 1
        with recorded_warnings() as said:
            self.checkpointers[""].save(step, made, block=True)
        return said

    def load_with(self, **options: Any) -> None:
        self.checkpointers[""].load(**options)

    def load_into(self, into: Any) -> None:
        """Fill a state with the latest step."""
        self.checkpointers[""].load(into=into)

    def save_until_killed(self, first: int, record: str) -> None:
        """Save steps from `first` on, and keep the last that has succeeded in a file."""
        for step in itertools.count(first):
            self.save(step, {"seed": step, "kilobytes": 50}, block=True)
            Path(record).write_text(str(step), "ascii")

    def save_until_killed_of(self, first: int, about: dict[str, Any]) -> None:
        """Save steps from `first` on, in each the state that `about` describes, with the step as its seed."""
        for step in itertools.count(first):
            self.save(step, {**about, "seed": step}, block=True)

    def node_of_ranks(self) -> tuple[int, ...]:
        nodes: tuple[int, ...] = self.checkpointers[""]._context.nodes.node_of  # type: ignore[attr-defined]
        return nodes

    def cut_local(self, phase: str, action: str) -> None:
        """The same as cut(), for nodes with disks of their own."""
        _cut_local_at(phase, {"kill": _kill, "raise": _raise}[action])

    def cut(self, phase: str, action: str) -> None:
        """Die, stop, raise or leave at a phase of the next save."""
        _cut_at(phase, {"kill": _kill, "stop": _stop, "exit": _exit, "raise": _raise}[action])


class Interrupted(Exception):
    """Raised by what poses as a signal handler."""


# What happens in the thread of a save before its exchange belongs to the thread that does the rest.
_BEGINNING = {
    function.__code__
    for function in (
        tl.Checkpointer._begin_together,
        tl.Checkpointer._begin,
        StepSave.__init__,
        SaveHandle._start,
        GroupRanks.exchange,
        Exchanges.begin,
        Exchange.__init__,
        Exchange.__enter__,
        Attempts.begin,
        start_thread,
    )
}


class _Replaced:
    """A store one of whose steps another job replaces, with states whose seeds count from 100."""

    def __init__(self, store: Any, directory: str, step: int, times: int) -> None:
        self._store, self._directory, self._step = store, directory, step
        self._seeds = iter(range(100, 100 + times))

    def open_manifest(self, step: int) -> Any:
        for seed in itertools.islice(self._seeds, 1):
            other = tl.Checkpointer(self._directory, process_group=False)
            other.load()
            other.save(self._step, make_state(seed, 1), block=True)
        return self._store.open_manifest(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Extended:
    """A store into which another job saves once before it is asked for the last step."""

    def __init__(self, store: Any, directory: str, step: int) -> None:
        self._store, self._directory, self._step = store, directory, step

    def latest(self) -> Any:
        other = tl.Checkpointer(self._directory, process_group=False)
        if self._step not in other.steps():
            if other.latest() is not None:
                other.load()
            other.save(self._step, make_state(self._step, 1), block=True)
        return self._store.latest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Removed:
    """A store one of whose steps another job removes before its manifest is opened."""

    def __init__(self, store: Any, directory: str, step: int) -> None:
        self._store, self._directory, self._step = store, directory, step

    def open_manifest(self, step: int) -> Any:
        other = tl.Checkpointer(self._directory, process_group=False)
        if self._step in other.steps():
            other.delete(self._step)
        return self._store.open_manifest(step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Failing:
    """A store, one of the functions of whose saves fails."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise OSError(5, "injected")
        if name == "begin":
            return lambda *arguments: _Failing(self._store.begin(*arguments), self._name)
        return getattr(self._store, name)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    # To this thread: one to the process may be taken by another thread, and this one goes on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _exit() -> None:
    os._exit(7)


def _raise() -> None:
    raise OSError(5, "injected failure")


def _cut_at(phase: str, action: Any) -> None:
    save = StepSave
    begin, commit, post = save.begin, save._commit, Exchange.post

    def cut_begin(self: Any) -> Any:
        if phase == "begin":
            action()
        files = begin(self)
        if phase == "placed":
            action()
        return _CutFiles(self, files, phase, action)

    def cut_commit(self: Any, written: Any) -> Any:
        if phase == "commit":
            action()
        committed = commit(self, written)
        if phase == "committed":
            action()
        return committed

    def cut_post(self: Any, topic: str, value: Any) -> None:
        post(self, topic, value)
        if phase == "reported" and topic == "written":
            action()

    save.begin, save._commit, Exchange.post = cut_begin, cut_commit, cut_post  # type: ignore[method-assign]


def _cut_local_at(phase: str, action: Any) -> None:
    save = LocalSave
    begin, prepare, mark = save.begin, save._prepare, NodeDirectory.commit

    def cut_begin(self: Any) -> Any:
        files = begin(self)
        if phase == "placed":
            action()
        return _CutFiles(self, files, phase, action)

    def cut_prepare(self: Any, whole: Any) -> None:
        if phase == "prepare":
            action()
        prepare(self, whole)
        if phase == "prepared":
            action()

    def cut_mark(self: Any, name: str) -> None:
        if phase == "mark":
            action()
        mark(self, name)
        if phase == "marked":
            action()

    save.begin, save._prepare, NodeDirectory.commit = cut_begin, cut_prepare, cut_mark  # type: ignore[method-assign]


class _CutFiles:
    def __init__(self, save: Any, files: Any, phase: str, action: Any) -> None:
        self._files, self._phase, self._action = files, phase, action
        save._files = files

    def finish(self) -> None:
        if self._phase == "writing":
            self._action()
        self._files.finish()
        if self._phase == "durable":
            self._action()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)


def mount_privately(source: str, target: str) -> None:
    """Mount a folder over another one, for this process alone. Before it has threads; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_namespace, bind, private = 0x20000, 0x1000, 0x40000 | 0x4000  # as in sched.h and sys/mount.h
    for failed in (
        libc.unshare(new_namespace),
        libc.mount(b"none", b"/", None, private, None),
        libc.mount(source.encode(), target.encode(), None, bind, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "cannot mount privately")


def serve(
    rank: int, size: int, host: str, port: int, commands: Connection, mounts: tuple[str, str] | None = None
) -> None:
    """Do what comes as (name, arguments) until None comes; leave the interpreter as a script does."""
    if mounts is not None:
        mount_privately(*mounts)
    torch.set_num_threads(1)
    it = Rank(rank, size, host, port)
    commands.send((True, None))
    while (command := commands.recv()) is not None:
        name, arguments, keywords = command
        try:
            reply = (True, getattr(it, name)(*arguments, **keywords))
        except Exception as error:
            reply = (False, (isinstance(error, tl.Error), type(error).__name__, str(error)))
        commands.send(reply)


class Failed(Exception):
    """What a rank raised."""

    def __init__(self, rank: int, is_ours: bool, kind: str, message: str) -> None:
        super().__init__(f"rank {rank}: {kind}: {message}")
        self.is_ours, self.kind, self.message = is_ours, kind, message


def start_fork_server() -> None:
    """Start the process that ranks are forked from, if it does not run, so that it finds our modules.

    PYTHONPATH says where. It is restored afterwards: other tests start Python in other environments.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class RankProcesses:
    """Some ranks; a context that kills what is left of them."""

    def __init__(
        self, size: int, host: str = "agent", mounts: Sequence[tuple[str, str]] | None = None
    ) -> None:
        """`host`: who has the group's store, "agent" (this process) or "rank 0".

        mounts: of each rank, a folder and the one that it is mounted over, privately.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["rank_processes"])
        start_fork_server()
        self.size = size
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        if host != "agent":
            self._store = None
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, size, host, port, theirs, mounts and mounts[rank]), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for rank in range(size):
            self.reply(rank)

    def __enter__(self) -> "RankProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(REPLY_SECONDS)
            pipe.close()
        self._store = None

    def tell(self, rank: int, name: str, /, *arguments: Any, **keywords: Any) -> None:
        """Tell a rank; it answers with reply()."""
        self.pipes[rank].send((name, arguments, keywords))

    def reply(self, rank: int, seconds: float = REPLY_SECONDS) -> Any:
        """What a rank answers; raises Failed with what it raised, EOFError when it is dead."""
        assert self.pipes[rank].poll(seconds), f"rank {rank} hangs"
        try:
            well, value = self.pipes[rank].recv()
        except ConnectionResetError:
            raise EOFError from None
        if not well:
            raise Failed(rank, *value)
        return value

    def one(self, rank: int, name: str, /, *arguments: Any, **keywords: Any) -> Any:
        """Tell one rank, and wait for its answer."""
        self.tell(rank, name, *arguments, **keywords)
        return self.reply(rank)

    def all(self, name: str, /, *arguments: Any, **keywords: Any) -> list[Any]:
        """Tell all ranks the same; their answers."""
        for rank in range(self.size):
            self.tell(rank, name, *arguments, **keywords)
        return [self.reply(rank) for rank in range(self.size)]

    def failures(
        self, name: str, /, *arguments: Any, ranks: Iterable[int] | None = None, **keywords: Any
    ) -> dict[int, Failed]:
        """Tell ranks the same; what each raised."""
        chosen = list(range(self.size)) if ranks is None else list(ranks)
        for rank in chosen:
            self.tell(rank, name, *arguments, **keywords)
        return self.collect(chosen)

    def collect(self, ranks: Iterable[int]) -> dict[int, Failed]:
        """What each of the ranks raised."""
        failed = {}
        for rank in ranks:
            try:
                self.reply(rank)
            except Failed as error:  # noqa: PERF203 - all are asked
                failed[rank] = error
        return failed

    def finish(self) -> None:
        """Let all come to their end."""
        for pipe in self.pipes:
            pipe.send(None)
        for rank, process in enumerate(self.processes):
            process.join(REPLY_SECONDS)
            assert process.exitcode == 0, f"rank {rank}: {process.exitcode}"


def debris(directory: Path, volumes: Iterable[Path] = ()) -> list[str]:
    """Files and directories that belong to no checkpoint, once a new Checkpointer was made."""
    checkpointer = tl.Checkpointer(directory, process_group=False)
    known = {directory / "lock", directory / "trunkline-checkpoints.json"}
    for volume in map(Path, checkpointer._context.store.volumes):
        known |= {volume, volume / "home"}
    for step in checkpointer.steps():
        manifest = checkpointer._context.store.read_manifest(step)
        for path in map(Path, checkpointer._context.store.shard_paths(manifest)):
            known |= {path, path.parent}
        name = f"step-{step:08}"
        known |= {directory / name, directory / name / f"manifest-{manifest['commit']:010}"}
    return [str(path) for root in (directory, *volumes) for path in root.rglob("*") if path not in known]
