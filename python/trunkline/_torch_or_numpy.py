"""torch, or where it is not installed a stand-in of numpy arrays: numpy is all that the package requires.

from trunkline._torch_or_numpy import torch
"""

from typing import TYPE_CHECKING

from trunkline._errors import Unsupported

if TYPE_CHECKING:
    import torch as torch

    HAS_TORCH: bool
else:
    try:
        import torch

        HAS_TORCH = True
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is installed, and lacks something
            raise
        from trunkline import _numpy_torch as torch

        HAS_TORCH = False

# For messages: what tensors are of.
LIBRARY = "torch" if HAS_TORCH else "numpy"
VERSION = str(torch.__version__)


def require_torch(what: str, instead: str, path: str | None = None) -> None:
    """Raise Unsupported if torch is not installed. `what` needs it; `instead`: what to do without it."""
    if not HAS_TORCH:
        raise Unsupported(
            None, f"{what} needs torch, which is not installed: pip install torch, or {instead}", path
        )
