"""Many saves in one process."""

from collections.abc import Callable

RunScript = Callable[..., str]


def test_a_thousand_saves_leave_nothing_in_the_process(run_script: RunScript) -> None:
    printed = run_script("""
        import gc, os, shutil, tempfile, time
        from pathlib import Path
        import torch
        import trunkline as tl
        from trunkline._tensor_io.background import unfinished

        # No disk behind it where that can be had: a thousand times fsync takes its time.
        root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else "."))
        faults = tl.Faults()
        engine = tl.Engine(faults=faults)
        state = {"model": {"w": torch.ones(300, 7), "b": torch.zeros(5)}, "step": 1, "rest": [1, "x", None]}
        checkpointer = tl.Checkpointer(root / "steps", keep=2, process_group=False, engine=engine)

        def save(number):
            way = number % 6
            if way == 0:
                checkpointer.save(number, state)
            elif way == 1:
                checkpointer.save(number, state, block=True)
            elif way == 2:
                tl.save(state, root / "file.pt", engine=engine)
            elif way == 3:
                tl.save_async(state["model"], root / "file.safetensors", engine=engine).wait()
            elif way == 4:
                tl.save_async(state, root / "dropped.pt", engine=engine)
            else:  # one that fails
                checkpointer.wait()
                for done in list(unfinished):
                    done.wait()
                faults.fail("sync", faults.commands("sync"), 5)
                try:
                    checkpointer.save(number, state, block=number % 4 == 1)
                    checkpointer.wait()
                    raise AssertionError("it did not fail")
                except tl.Error:
                    pass
                checkpointer.load()

        def held():
            checkpointer.wait()
            for done in list(unfinished):
                done.wait()
            gc.collect()
            statm = Path("/proc/self/statm").read_text().split()
            return {
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "pinned": engine.stats()["pinned_bytes"],
                "resident": int(statm[1]) * os.sysconf("SC_PAGE_SIZE"),
            }

        try:
            for number in range(400):
                save(number)
            before = held()
            for number in range(400, 1400):
                save(number)
            deadline = time.monotonic() + 10  # threads that have done their work may still be about to end
            while (after := held())["threads"] > before["threads"] and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            shutil.rmtree(root)
        for what in ("descriptors", "threads"):
            assert after[what] <= before[what], (what, before, after)
        # Staging blocks of 4 MiB stay: as many as saves were ever under way at once, which is chance.
        kept = after["pinned"] - before["pinned"]
        assert kept <= 4 * (4 << 20), (before, after)
        grown = after["resident"] - before["resident"] - max(0, kept)
        assert grown < 4 << 20, (before, after)
        print("same")
    """)
    assert printed == "same\n"
