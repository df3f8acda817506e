"""Load plug-ins: objects that other distributions offer to this package by entry points.

A plug-in offers one object in a group of entry points, such as ``flower_ext.forms``. A plug-in that
cannot be loaded is left out with a warning, and the package works without it. To leave out all
plug-ins, set ``FLOWER_EXT_PLUGINS=none`` in the environment.
"""

import os
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from logging import getLogger
from shlex import quote
from typing import Any

from flower_ext.errors import InvalidValue

log = getLogger("flwr")


def points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, ordered by name, without loading them."""
    if (setting := os.environ.get("FLOWER_EXT_PLUGINS", "")) not in ("", "none"):
        raise InvalidValue(f"FLOWER_EXT_PLUGINS={setting!r}: expected 'none', or an unset variable")
    return () if setting else tuple(sorted(entry_points(group=group), key=lambda point: point.name))


@lru_cache(maxsize=16)
def offered(group: str) -> tuple[Any, ...]:
    """Return the objects that plug-ins offer in a group of entry points, ordered by name."""
    parts = []
    for point in points(group):
        try:
            parts.append(point.load())
        except Exception as error:  # a plug-in may raise anything while it is imported
            log.warning("the plug-in %s is left out: %r", point.value, error)
    return tuple(parts)


def how_to_install(distribution: str) -> str:
    """Return a text that says how to install a plug-in of this project, with any extras."""
    folder = distribution.replace("flower-ext-", "./plugins/")
    return f"pip install {quote(distribution)}, or {quote(folder)} in a checkout"
