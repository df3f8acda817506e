"""State of the parties, stored so that a restart continues at the same stage and reuses nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Any, Self

from flower_ext.errors import InvalidValue
from flower_ext.secure.weighting.lattice.settings import LatticeSettings


class SiloStage(Enum):
    """Progress of a silo's set-up."""

    NEW = auto()
    KEYED = auto()
    SEEDED = auto()
    COUNTED = auto()


class ServerStage(Enum):
    """Progress of the server's set-up."""

    NEW = auto()
    KEYS_RELAYED = auto()
    SEED_RELAYED = auto()
    ANSWERED = auto()
    COUNTED = auto()


def _stored(value: Any) -> Any:
    if isinstance(value, list):
        return [_stored(one) for one in value]
    if isinstance(value, bytes):
        return value.hex()
    return value.name if isinstance(value, Enum) else value


class _State:
    """A party's state as JSON, with bytes in hexadecimal and stages by name."""

    def encode(self, settings: LatticeSettings) -> bytes:
        """Return JSON that names the settings it belongs to."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        facts = {name: _stored(value) for name, value in own.items()}
        return json.dumps({"context": settings.context.hex(), **facts}).encode()

    @classmethod
    def decode(cls, state: bytes, settings: LatticeSettings) -> Self:
        """Undo `encode`.

        Raises
        ------
        ValueError
            ``state`` is malformed, or belongs to another party or to other settings.
        """
        try:
            facts = json.loads(state)
            if facts["context"] != settings.context.hex():
                raise InvalidValue("state: expected one that was exported under the same settings")
            kinds = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
            if set(facts) != {"context", *kinds}:
                raise InvalidValue("state: expected bytes from export_state of this party")
            return cls(**{name: _READERS[str(kinds[name])](facts[name]) for name in kinds})
        except InvalidValue:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidValue("state: expected bytes from export_state") from error


@dataclass(frozen=True, kw_only=True)
class SiloState(_State):
    """State that a silo needs after a restart, at any stage. It holds secrets in the clear."""

    index: int
    stage: SiloStage
    private: bytes
    silo_keys: list[bytes]
    server_key: bytes
    seed: bytes
    counts: list[int]
    last_epoch: int
    weights_digest: bytes
    last_round: int


@dataclass(frozen=True, kw_only=True)
class ServerState(_State):
    """State that the server needs after a restart, at any stage. It holds secrets in the clear."""

    stage: ServerStage
    key_seed: bytes
    public_seed: bytes
    nonce: bytes
    exponent: int
    answer: bytes
    shifted: list[int]
    last_epoch: int
    last_round: int


_READERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "bytes": bytes.fromhex,
    "list[int]": lambda values: [int(value) for value in values],
    "list[bytes]": lambda values: [bytes.fromhex(value) for value in values],
    "SiloStage": lambda name: SiloStage[name],
    "ServerStage": lambda name: ServerStage[name],
}
