"""State that a member stores between two messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any

from flower_ext.errors import InvalidValue
from flower_ext.secure.aggregation.context import RoundContext


class Stage(Enum):
    """The last step that a member has taken."""

    NEW = auto()
    ADVERTISED = auto()
    SHARED = auto()
    MASKED = auto()
    UNMASKED = auto()


@dataclass(frozen=True, kw_only=True)
class MemberState:
    """Everything that a member needs for its next steps, and nothing else.

    ``keys`` holds its neighbours' public keys. ``held`` holds, for each neighbour that shared, its
    shares of seed and key; they are empty if this member could not open them.
    """

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

    def encode(self) -> bytes:
        """Return the state as JSON."""
        values: dict[str, Any] = {}
        for field_of_state in fields(self):
            value = getattr(self, field_of_state.name)
            if isinstance(value, RoundContext):
                value = value.to_bytes().decode()
            elif isinstance(value, Stage):
                value = value.name
            elif isinstance(value, bytes):
                value = value.hex()
            elif isinstance(value, Mapping):
                value = {str(key): entry.hex() for key, entry in value.items()}
            values[field_of_state.name] = value
        return json.dumps(values).encode()

    @classmethod
    def decode(cls, data: bytes) -> MemberState:
        """Undo `encode`.

        Raises
        ------
        InvalidValue
            The bytes are not a state.
        """
        try:
            stored = json.loads(data)
            context = RoundContext.from_bytes(stored.pop("context").encode())
            index, neighbours = int(stored.pop("index")), tuple(map(int, stored.pop("neighbours")))
            stage = Stage[stored.pop("stage")]
            values: dict[str, Any] = {
                name: bytes.fromhex(value)
                if isinstance(value, str)
                else {int(key): bytes.fromhex(entry) for key, entry in value.items()}
                for name, value in stored.items()
            }
            return cls(context=context, index=index, neighbours=neighbours, stage=stage, **values)
        except InvalidValue:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise InvalidValue("state: expected bytes from Member.to_bytes") from error
