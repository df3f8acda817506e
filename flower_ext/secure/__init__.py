"""Sums over parties in which no contribution can be read. Uses neither torch nor Flower.

`aggregation` computes the secure sum of one training round; `weighting` is the protocol of Uldp-FL.
The other modules serve both: labelled keys, masks of pairs, fixed-point numbers, threads.

This module also exports the names of `weighting`. It imports them at first use, because `weighting`
needs the extra of that name and `aggregation` does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_ext.errors import IncompleteRound, ProtocolError

if TYPE_CHECKING:
    from flower_ext.secure.weighting.agreement import WeightingSettings
    from flower_ext.secure.weighting.estimate import RoundEstimate, estimate_round
    from flower_ext.secure.weighting.messages import (
        BlindedCounts,
        DrawAnswer,
        DrawOffer,
        EncryptedWeights,
        MaskedSum,
        SealedSeed,
        SealedWeights,
        SiloKey,
    )
    from flower_ext.secure.weighting.paillier import ZeroPool
    from flower_ext.secure.weighting.server import WeightingServer
    from flower_ext.secure.weighting.silo import WeightingSilo

__all__ = [
    "BlindedCounts",
    "DrawAnswer",
    "DrawOffer",
    "EncryptedWeights",
    "IncompleteRound",
    "MaskedSum",
    "ProtocolError",
    "RoundEstimate",
    "SealedSeed",
    "SealedWeights",
    "SiloKey",
    "WeightingServer",
    "WeightingSettings",
    "WeightingSilo",
    "ZeroPool",
    "estimate_round",
]

_MODULES = {
    "BlindedCounts": "messages",
    "DrawAnswer": "messages",
    "DrawOffer": "messages",
    "EncryptedWeights": "messages",
    "MaskedSum": "messages",
    "RoundEstimate": "estimate",
    "SealedSeed": "messages",
    "SealedWeights": "messages",
    "SiloKey": "messages",
    "WeightingServer": "server",
    "WeightingSettings": "agreement",
    "WeightingSilo": "silo",
    "ZeroPool": "paillier",
    "estimate_round": "estimate",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.weighting.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
