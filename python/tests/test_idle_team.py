"""OpenMP's threads sleep while a streamed model waits, without environment variables."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5.0")

from support_models import make_folder

_PROGRAM = """
import gc, resource, sys, threading, time
import torch
import trunkline as tl
from trunkline._streaming.idle_team import _loaded_libgomp
from trunkline._streaming.streaming import streaming_of

if _loaded_libgomp() is None:
    print("no libgomp")
    sys.exit()
torch.set_num_threads(2)
values = torch.ones(1 << 18)

def is_there():
    return any(thread.name == "trunkline-idle-team" for thread in threading.enumerate())

def waiting_seconds():
    values.mul_(1.0)
    used = 0.0
    for _ in range(20):
        values.mul_(1.0)
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(0.01)
        after = resource.getrusage(resource.RUSAGE_SELF)
        used += after.ru_utime - before.ru_utime
    return used

print(waiting_seconds())
load = lambda: tl.transformers.from_pretrained(sys.argv[1], memory_budget=int(sys.argv[2]))
model = load()
print(waiting_seconds())
other = load()
print(streaming_of[model].idle_team is streaming_of[other].idle_team is not None, is_there())
del model, other
gc.collect()
for _ in range(1000):
    if not is_there():
        break
    time.sleep(0.01)
print(is_there())
"""


def run(folder: Path, budget: int, **environment: str) -> list[str]:
    clean = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), str(budget)],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if "no libgomp" in done.stdout:
        pytest.skip("torch does not use libgomp")
    return done.stdout.split()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: its threads never spin")
def test_threads_sleep_while_a_model_is_streamed(tmp_path: Path) -> None:
    from test_streaming import least

    folder = make_folder(tmp_path)
    before, while_streaming, *others = run(folder, least(folder))
    assert float(while_streaming) < float(before) / 2
    assert others == ["True", "True", "False"]  # two models share a team, which ends with them


def test_what_the_environment_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from trunkline._streaming.idle_team import idle_team

    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "active")
            assert idle_team() is None
