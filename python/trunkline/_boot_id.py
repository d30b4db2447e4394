"""What names the running kernel."""

from pathlib import Path


def boot_id() -> str:
    """Return the id of the running kernel: the same in all containers of a machine, new after each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
