"""State of both parties, stored so that a restart reuses no epoch, round or mask."""

from __future__ import annotations

from dataclasses import dataclass

from flower_ext.secure.weighting.party_state import PartyState, SiloState, Stage


@dataclass(frozen=True, kw_only=True)
class LatticeSiloState(SiloState):
    """State that a silo needs after a restart, at any stage. It holds secrets in the clear."""

    last_epoch: int
    weights_digest: bytes


@dataclass(frozen=True, kw_only=True)
class LatticeServerState(PartyState):
    """State that the server needs after a restart, at any stage. It holds secrets in the clear."""

    stage: Stage
    key_seed: bytes
    public_seed: bytes
    transfer_secret: bytes
    answer: bytes
    shifted: list[int]
    last_epoch: int
    last_round: int
