"""Keep names that moved working for one release, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def former_names(
    package: str, now: Mapping[str, str], *, stacklevel: int = 2
) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, which finds names that have moved elsewhere.

    Parameters
    ----------
    package : str
        The package's ``__name__``.
    now : Mapping[str, str]
        Full path of each moved name, by its former name.
    stacklevel : int
        As in `warnings.warn`, counted to the line that uses the former name.
    """

    def find(name: str) -> Any:
        if name not in now:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(
            f"{package}.{name} has moved to {now[name]}; import it from there",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        module, _, last = now[name].rpartition(".")
        return getattr(import_module(module), last)

    return find
