"""Makes errors of loading in place say that tensors may be partly filled."""

from collections.abc import Iterator
from contextlib import contextmanager

from trunkline._errors import Error, add_note, reword


@contextmanager
def partly_filled(target: str, remedy: str) -> Iterator[None]:
    """Make errors say that the tensors of `target` may be filled in part; `remedy` completes the advice.

    Checksums are verified as the bytes arrive in the tensors, since loading in place avoids a second copy. So
    an error leaves some tensors unchanged, some loaded, some damaged, and the caller may not see that they
    are unusable. A missing file is found before the first byte is read.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except BaseException as error:
        says = (
            f"the tensors of {target} may now hold a mixture of former, loaded and damaged values; do not "
            f"use them before all are loaded again{remedy}"
        )
        if isinstance(error, Error):
            reword(error, f"{error}; {says}")
        else:
            add_note(error, says)
        raise
