"""Runs one target of fuzz_targets.py under atheris: `scripts/fuzz.py --python` does.

fuzz_python.py TARGET [options of libFuzzer] CORPUS...
fuzz_python.py --seeds DIR: print the targets, and write the seeds of each into DIR/TARGET.
"""

import sys
from pathlib import Path


def write_seeds(folder: Path) -> None:
    from fuzz_targets import TARGETS, seeds

    for name in TARGETS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds(name)):
            (folder / name / f"seed-{number}").write_bytes(data)
        print(name)


def main() -> None:
    if sys.argv[1] == "--seeds":
        write_seeds(Path(sys.argv[2]))
        return
    import atheris  # type: ignore[import-not-found]
    import torch.distributed.checkpoint  # noqa: F401 - not instrumented: that would take minutes

    with atheris.instrument_imports(include=["trunkline"]):
        from fuzz_targets import TARGETS

    target = TARGETS[sys.argv.pop(1)]

    def run(data: bytes) -> None:
        target(data)

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
