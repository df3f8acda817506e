"""Names that moved go on working for one release, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def former_names(
    package: str, now: Mapping[str, str], *, stacklevel: int = 2
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are somewhere else now.

    Parameters
    ----------
    package : str
        Its ``__name__``.
    now : Mapping[str, str]
        The whole path of each former name.
    stacklevel : int
        Calls from the warning to the line that asks for the name.
    """

    def find(name: str) -> Any:
        if name not in now:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(
            f"{package}.{name} is {now[name]} now: import that",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        module, _, last = now[name].rpartition(".")
        return getattr(import_module(module), last)

    return find
