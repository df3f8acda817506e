"""State of a silo, stored so that a restart continues at the same stage and reuses no mask."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto

from flower_ext.errors import InvalidValue
from flower_ext.secure.weighting.agreement import WeightingSettings


class Stage(Enum):
    """Progress of a silo's set-up."""

    NEW = auto()
    KEYED = auto()
    SEEDED = auto()
    COUNTED = auto()


@dataclass(frozen=True, kw_only=True)
class SiloState:
    """All that a silo needs to continue after a restart. It holds secrets in the clear."""

    index: int
    stage: Stage
    private: bytes
    silo_keys: tuple[bytes, ...]
    modulus: int | None
    seed: bytes
    counts: list[int]
    last_round: int

    def encode(self, settings: WeightingSettings) -> bytes:
        """Return JSON that names the settings it belongs to."""
        facts = {
            "context": settings.context.hex(),
            "index": self.index,
            "stage": self.stage.name,
            "private": self.private.hex(),
            "silo_keys": [key.hex() for key in self.silo_keys],
            "n": "" if self.modulus is None else hex(self.modulus),
            "seed": self.seed.hex(),
            "counts": self.counts,
            "last_round": self.last_round,
        }
        return json.dumps(facts).encode()

    @classmethod
    def decode(cls, state: bytes, settings: WeightingSettings) -> SiloState:
        """Undo `encode`.

        Raises
        ------
        ValueError
            ``state`` is malformed or was exported under other settings.
        """
        try:
            facts = json.loads(state)
            if facts["context"] != settings.context.hex():
                raise InvalidValue("state: expected one that was exported under the same settings")
            stage = Stage[facts["stage"]]
            return cls(
                index=facts["index"],
                stage=stage,
                private=bytes.fromhex(facts["private"]),
                silo_keys=tuple(bytes.fromhex(key) for key in facts["silo_keys"]),
                modulus=None if stage is Stage.NEW else int(facts["n"], 16),
                seed=bytes.fromhex(facts["seed"]),
                counts=list(facts["counts"]),
                last_round=int(facts["last_round"]),
            )
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise InvalidValue("state: expected bytes from export_state") from error
