"""State of a party, stored so that a restart continues at the same stage and reuses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, Self

from flower_ext.errors import InvalidValue
from flower_ext.secure.weighting.party_settings import PartySettings


class Stage(Enum):
    """Progress of a party's set-up."""

    NEW = auto()
    KEYED = auto()
    SEEDED = auto()
    COUNTED = auto()


class PartyState:
    """A frozen dataclass as JSON, with bytes in hexadecimal and stages by name."""

    def encode(self, settings: PartySettings) -> bytes:
        """Return JSON that names the settings it belongs to."""
        values = {name: _stored(getattr(self, name)) for name in self._kinds()}
        return json.dumps({"context": settings.context.hex(), **values}).encode()

    @classmethod
    def decode(cls, state: bytes, settings: PartySettings) -> Self:
        """Undo `encode`.

        Raises
        ------
        ValueError
            ``state`` is malformed, or belongs to another party or to other settings.
        """
        try:
            values = json.loads(state)
            if values["context"] != settings.context.hex():
                raise InvalidValue("state: expected one that was exported under the same settings")
            kinds = cls._kinds()
            if set(values) != {"context", *kinds}:
                raise InvalidValue("state: expected bytes from export_state of this party")
            return cls(**{name: _READERS[kind](values[name]) for name, kind in kinds.items()})
        except InvalidValue:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValue("state: expected bytes from export_state") from error

    @classmethod
    def _kinds(cls) -> dict[str, str]:
        return {field.name: str(field.type) for field in fields(cls)}  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class SiloState(PartyState):
    """State that a silo needs after a restart, at any stage. It holds secrets in the clear."""

    index: int
    stage: Stage
    private: bytes
    silo_keys: list[bytes]
    server_key: bytes
    seed: bytes
    counts: list[int]
    last_round: int


def _stored(value: Any) -> Any:
    if isinstance(value, list):
        return [_stored(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.name if isinstance(value, Enum) else value


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "bytes": bytes.fromhex,
    "list[int]": lambda values: [int(value) for value in values],
    "list[bytes]": lambda values: [bytes.fromhex(value) for value in values],
    "Stage": lambda name: Stage[name],
}
