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

    ``keys`` holds its neighbours' public keys, and ``held`` their shares of seed and key.
    """

    stage: Stage = Stage.NEW
    mask_private: bytes = b""
    channel_private: bytes = b""
    seed: bytes = b""
    question: bytes = b""
    answer: bytes = b""
    keys: Mapping[int, bytes] = field(default_factory=dict)
    held: Mapping[int, bytes] = field(default_factory=dict)

    def after(self, **changes: Any) -> MemberState:
        """Return the state with some fields changed."""
        return replace(self, **changes)

    def encode(self, context: RoundContext, index: int) -> bytes:
        """Return the state as JSON, with the round and the member that it belongs to."""
        facts: dict[str, Any] = {"digest": context.digest.hex(), "index": index}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Stage):
                facts[one.name] = value.name
            elif isinstance(value, bytes):
                facts[one.name] = value.hex()
            else:
                facts[one.name] = {str(key): entry.hex() for key, entry in value.items()}
        return json.dumps(facts).encode()

    @classmethod
    def decode(cls, data: bytes, context: RoundContext) -> tuple[MemberState, int]:
        """Undo `encode`: return the state and the member's number.

        Raises
        ------
        InvalidValue
            The bytes are not a state, or belong to another round.
        """
        try:
            facts = json.loads(data)
            if facts.pop("digest") != context.digest.hex():
                raise InvalidValue(
                    f"state: expected a state of round {context.round_number} of this run"
                )
            index, stage = int(facts.pop("index")), Stage[facts.pop("stage")]
            values: dict[str, Any] = {
                name: bytes.fromhex(value)
                if isinstance(value, str)
                else {int(key): bytes.fromhex(entry) for key, entry in value.items()}
                for name, value in facts.items()
            }
            return cls(stage=stage, **values), index
        except InvalidValue:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidValue("state: expected bytes from Member.to_bytes") from error
