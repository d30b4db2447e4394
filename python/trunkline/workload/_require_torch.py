"""What workloads need torch for, and what to install."""

import errno

from trunkline._errors import Unsupported


def require_torch(what: str) -> None:
    """Raise Unsupported if torch is not installed. `what` requires it, in the plural."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise Unsupported(errno.EOPNOTSUPP, f"{what} require the package torch: pip install torch") from error
