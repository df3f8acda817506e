"""The state of a method on the server between two rounds: named groups of arrays.

Checkpoints, resumed runs and `Upcycled` read a state without knowing its method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from flower_ext.errors import InvalidValue
from flower_ext.federation.messages import records
from flower_ext.federation.messages.records import Arrays

T = TypeVar("T")
_EVERYONE, _SERVER = "everyone.", "server."


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a method on the server between two rounds: arrays by name, in named groups.

    Parameters
    ----------
    everyone : Mapping[str, Mapping[str, ndarray]]
        Groups that the server sends to all clients together with the model. Each group becomes a
        record of the message, under the group's name. `Upcycled` extrapolates the groups together
        with the model.
    server : Mapping[str, Mapping[str, ndarray]]
        Groups that never leave the server.

    Raises
    ------
    InvalidValue
        A group of ``everyone`` has the name of a record that messages already have, or of a group
        of ``server``; or a group holds anything but NumPy arrays of real numbers.
    """

    everyone: Mapping[str, Arrays] = field(default_factory=dict)
    server: Mapping[str, Arrays] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.everyone:
            if records.is_reserved(name) or name in self.server:
                raise InvalidValue(
                    f"State.everyone has the group {name!r}: expected a different name, "
                    "because a record of the messages, or a group of State.server, has this name"
                )
        for name, group in self.groups().items():
            for key, array in group.items():
                # Accept NumPy's scalars, because arithmetic of arrays without axes yields them.
                if not isinstance(array, np.ndarray | np.generic) or array.dtype.kind not in "fiub":
                    raise InvalidValue(
                        f"State has {key!r} of type {type(array).__name__} in the group {name!r}: "
                        "expected a NumPy array of real numbers"
                    )

    def groups(self) -> dict[str, Arrays]:
        """Return the arrays of all groups by name, as a checkpoint stores them."""
        return prefixed(_EVERYONE, self.everyone) | prefixed(_SERVER, self.server)

    def updated(
        self,
        *,
        everyone: Mapping[str, Arrays] | None = None,
        server: Mapping[str, Arrays] | None = None,
    ) -> State:
        """Return the state with these groups added; each replaces a group of the same name."""
        return State(
            everyone={**self.everyone, **(everyone or {})}, server={**self.server, **(server or {})}
        )

    @classmethod
    def of_groups(cls, groups: Mapping[str, Arrays]) -> State:
        """Rebuild a state from the groups that `groups` returned; ignore any other groups."""
        return cls(everyone=groups_under(_EVERYONE, groups), server=groups_under(_SERVER, groups))


def prefixed(prefix: str, groups: Mapping[str, Arrays]) -> dict[str, Arrays]:
    """Return the groups, with ``prefix`` before their names."""
    return {prefix + name: group for name, group in groups.items()}


def groups_under(prefix: str, groups: Mapping[str, Mapping[str, T]]) -> dict[str, dict[str, T]]:
    """Return copies of the groups whose names begin with ``prefix``; remove it from the names."""
    names = [name for name in groups if name.startswith(prefix)]
    return {name.removeprefix(prefix): dict(groups[name]) for name in names}
