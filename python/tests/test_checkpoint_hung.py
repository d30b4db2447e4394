"""A disk that hangs while a directory of checkpoints is opened, checked or changed: Ctrl-C ends the wait."""

from collections.abc import Callable

import pytest

RunScript = Callable[..., str]

# A lease on the lock of a directory keeps whoever opens it waiting, as a disk that does not answer does. Such
# a wait is not cut short by a signal: another thread receives it.
LEASED = """
import fcntl, os, signal, sys, threading
import torch
import trunkline as tl

signal.signal(signal.SIGIO, signal.SIG_IGN)  # that somebody waits
checkpointer = tl.Checkpointer("run", process_group=False)
checkpointer.save(1, {{"x": torch.arange(10)}}, block=True)
holder = os.open("run/lock", os.O_RDWR)
try:
    fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as error:
    print("no leases:", error)
    sys.exit()
try:
    threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGINT)).start()
    {call}
    print("was not held up")
except KeyboardInterrupt:
    print("interrupted")
fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
os.close(holder)
print(tl.Checkpointer("run", process_group=False).steps())
"""


@pytest.mark.parametrize(
    "call",
    [
        'tl.Checkpointer("run", process_group=False)',
        "checkpointer.delete(1)",
        "checkpointer._context.store.collect()",
    ],
)
def test_ctrl_c_ends_a_call_on_a_hung_disk(run_script: RunScript, call: str) -> None:
    printed = run_script(LEASED.format(call=call))
    if printed.startswith("no leases"):
        pytest.skip(printed)
    first, steps = printed.splitlines()
    assert first == "interrupted"
    assert steps == "[1]" or "delete" in call  # which ends beside


def test_ctrl_c_ends_a_verification_whose_reads_hang(run_script: RunScript) -> None:
    printed = run_script("""
        import os, signal, threading
        import torch
        import trunkline as tl

        faults = tl.Faults()
        engine = tl.Engine(faults=faults)
        checkpointer = tl.Checkpointer("run", process_group=False, engine=engine)
        checkpointer.save(1, {"x": torch.arange(10)}, block=True)
        sent = faults.commands("read")
        faults.hold("read", sent, 1 << 40)

        def interrupt_when_hung():
            while faults.commands("read") == sent:
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt_when_hung).start()
        try:
            checkpointer.verify(1)
        except KeyboardInterrupt:
            print("interrupted")
        faults.release()
        checkpointer.verify(1)
        """)
    assert printed == "interrupted\n"
