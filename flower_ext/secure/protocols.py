"""Protocols of private weighting by name: that of this package, and those of plug-ins.

Importing a protocol needs the extra ``weighting``; importing this module does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from flower_ext.errors import InvalidValue

if TYPE_CHECKING:
    from flower_ext.secure.weighting.protocol import WeightingProtocol

_GROUP = "flower_ext.weighting"
"""Group of the entry points of further protocols."""
_PAILLIER = EntryPoint(
    name="paillier",
    value="flower_ext.secure.weighting.private_weighting:PrivateWeighting",
    group=_GROUP,
)


@cache
def protocols() -> Mapping[str, EntryPoint]:
    """Return the entry points of all installed protocols by name."""
    return {point.name: point for point in (*entry_points(group=_GROUP), _PAILLIER)}


def load_protocol(name: str) -> type[WeightingProtocol]:
    """Import the class of the protocol of that name.

    Raises
    ------
    ValueError
        No such protocol is installed; the message says what to install.
    """
    if name not in protocols():
        raise InvalidValue(
            f"protocol={name!r}: expected one of {', '.join(sorted(protocols()))}; another "
            f"protocol is a distribution of its own: pip install flower-ext-{name}"
        )
    protocol: type[WeightingProtocol] = protocols()[name].load()
    return protocol


def protocol_of(data: bytes) -> type[WeightingProtocol]:
    """Return the protocol of a run's settings or of a silo's state, which name it.

    Raises
    ------
    ValueError
        The bytes are malformed, or the protocol is not installed.
    """
    values = json.loads(data)
    if not isinstance(values, dict) or "kind" not in values:
        raise InvalidValue("settings: expected the name of a protocol")
    return load_protocol(str(values["kind"]))
