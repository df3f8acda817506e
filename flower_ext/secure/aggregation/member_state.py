"""State that a member stores between two messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, ClassVar

from flower_ext.secure.aggregation.context import RoundContext
from flower_ext.secure.stored_state import StoredState


class Stage(Enum):
    """The last step that a member has taken."""

    NEW = auto()
    ADVERTISED = auto()
    SHARED = auto()
    MASKED = auto()
    UNMASKED = auto()


@dataclass(frozen=True, kw_only=True)
class MemberState(StoredState):
    """Everything that a member needs for its next steps, and nothing else.

    ``keys`` holds its neighbours' public keys. ``held`` holds, for each neighbour that shared, its
    shares of seed and key; they are empty if this member could not open them.
    """

    readers: ClassVar = {
        "RoundContext": lambda text: RoundContext.from_bytes(text.encode()),
        "Stage": Stage.__getitem__,
    }

    context: RoundContext
    index: int
    neighbours: tuple[int, ...]
    stage: Stage = Stage.NEW
    mask_private: bytes = b""
    channel_private: bytes = b""
    seed: bytes = b""
    request: bytes = b""
    answer: bytes = b""
    keys: Mapping[int, bytes] = field(default_factory=dict)
    held: Mapping[int, bytes] = field(default_factory=dict)

    def after(self, **changes: Any) -> MemberState:
        """Return the state with some fields changed."""
        return replace(self, **changes)

    def forgetting(self, **changes: Any) -> MemberState:
        """Return a state with these fields, and with nothing else that this one has learned."""
        return MemberState(
            context=self.context, index=self.index, neighbours=self.neighbours, **changes
        )
