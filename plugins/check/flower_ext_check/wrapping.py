"""Replace functions of Flower, Opacus and this package, so that the check can watch an app's runs.

The package offers no hook for this purpose, because a hook that can take the noise away would
weaken every run.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

Wrapper = Callable[..., Any]
"""A function to call in place of another, which it gets as its first argument."""
Patch = tuple[Any, str, Wrapper]
"""A module or class, the name of a function in it, and the wrapper to call in its place."""


def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Call ``wrapper(original, ...)`` in place of a function, or a method, of ``owner``."""
    original = getattr(owner, name)

    @wraps(original)
    def called(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    setattr(owner, name, called)
