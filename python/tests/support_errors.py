"""The error classes of the package."""

import trunkline as tl

PUBLIC_ERRORS = [
    each
    for each in (getattr(tl, name) for name in dir(tl))
    if isinstance(each, type) and issubclass(each, tl.Error)
]
