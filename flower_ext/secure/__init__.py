"""Private weighting: keys, masks, fixed point, Paillier. Knows neither torch nor Flower."""

try:
    import cryptography as _cryptography  # noqa: F401
    import gmpy2 as _gmpy2  # noqa: F401
    import phe as _phe  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"flower_ext.secure needs {error.name}: pip install 'flower-ext[weighting]'",
        name=error.name,
    ) from error

from flower_ext.secure.errors import IncompleteRound, ProtocolError
from flower_ext.secure.estimate import RoundEstimate, estimate_round
from flower_ext.secure.messages import (
    BlindedCounts,
    EncryptedWeights,
    MaskedSum,
    SealedSeed,
    SiloKey,
)
from flower_ext.secure.paillier import ZeroPool
from flower_ext.secure.plan import WeightingPlan
from flower_ext.secure.weighting import WeightingServer, WeightingSilo

__all__ = [
    "BlindedCounts",
    "EncryptedWeights",
    "IncompleteRound",
    "MaskedSum",
    "ProtocolError",
    "RoundEstimate",
    "SealedSeed",
    "SiloKey",
    "WeightingPlan",
    "WeightingServer",
    "WeightingSilo",
    "ZeroPool",
    "estimate_round",
]
