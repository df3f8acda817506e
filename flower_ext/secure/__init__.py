"""Sums over parties that show nobody what one of them adds. Nothing here knows torch or Flower.

`weighting` is the protocol of Uldp-FL; next to it is what any such sum needs: keys and masks of
pairs, numbers as integers, threads.
"""

from flower_ext._former import former_names

try:
    import cryptography as _cryptography  # noqa: F401
    import gmpy2 as _gmpy2  # noqa: F401
    import phe as _phe  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"flower_ext.secure needs {error.name}: pip install 'flower-ext[weighting]'",
        name=error.name,
    ) from error

from flower_ext.errors import IncompleteRound, ProtocolError
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

__getattr__ = former_names(
    __name__, {"WeightingPlan": f"{__name__}.weighting.agreement.WeightingSettings"}
)
