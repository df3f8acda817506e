"""Uldp-FL: silos with users in common, and user-level DP across them.

Source: Kato, Xiong, Takagi, Cao, Yoshikawa, "Uldp-FL: Federated Learning with Across-Silo
User-Level Differential Privacy" (PVLDB 2024).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd, theory_learning_rate
from flower_ext.algorithms.uldp.group import UldpGroup
from flower_ext.algorithms.uldp.naive import UldpNaive
from flower_ext.algorithms.uldp.weighted import weighted_sum
from flower_ext.algorithms.uldp.weights import EqualWeights, WeightsByRecords, WeightSource

if TYPE_CHECKING:
    from flower_ext.algorithms.uldp.weighting.paillier_weighting import PrivateWeighting

__all__ = [
    "EqualWeights",
    "PrivateWeighting",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
    "WeightSource",
    "WeightsByRecords",
    "theory_learning_rate",
    "weighted_sum",
]
_PACKAGE = "flower_ext.algorithms.uldp"
_PRIVATE = {
    "PrivateWeighting": f"{_PACKAGE}.weighting.paillier_weighting",
}


def __getattr__(name: str) -> Any:
    """Import private weighting at first use, because it needs the extra ``weighting``."""
    if name not in _PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("flower_ext.secure.weighting")  # names the extra if it is not installed
    return getattr(import_module(_PRIVATE[name]), name)
