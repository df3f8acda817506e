"""State of a silo, stored so that a restart reuses no epoch, round or mask."""

from __future__ import annotations

from dataclasses import dataclass

from flower_ext.secure.weighting.silo_party import SiloState


@dataclass(frozen=True, kw_only=True)
class LatticeSiloState(SiloState):
    """State that a silo needs after a restart, at any stage. It holds secrets in the clear."""

    last_epoch: int
    weights_digest: bytes
