"""Makes functions independent of the modes of torch under which they are called."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def makes_ordinary_tensors(function: Callable[P, R]) -> Callable[P, R]:
    """Make `function` return ordinary tensors even when it is called under torch.inference_mode().

    Tensors made in that mode stay inference tensors: outside of it they can neither be changed in place nor
    require gradients. Loaded weights outlive the block in which they were loaded.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        from trunkline._torch_or_numpy import torch

        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


def independent_of_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` like makes_ordinary_tensors(), and make main memory the default device.

    Its own argument `device` decides where weights go, not torch.set_default_device() or a block of `with
    torch.device("meta")` around the call.
    """

    @makes_ordinary_tensors
    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        import torch

        with torch.device("cpu"):
            return function(*args, **kwargs)

    return call


def keeps_grad_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Make `function` leave the grad mode as it is, even when a signal handler raises in the midst of torch.

    torch.no_grad() leaves gradients disabled if Ctrl-C comes while it enables them again; training that
    goes on then fails in backward().
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        import torch

        enabled = torch.is_grad_enabled()
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(
                enabled
            )  # not torch.set_grad_enabled(): Python runs handlers within it

    return call
