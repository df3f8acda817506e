"""Uldp-FL: user-level DP for users whose records lie in several silos.

Source: Kato, Xiong, Takagi, Cao, Yoshikawa, "Uldp-FL: Federated Learning with Across-Silo
User-Level Differential Privacy" (PVLDB 2024).
"""

from typing import TYPE_CHECKING, Any

from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd, theory_learning_rate
from flower_ext.algorithms.uldp.group import UldpGroup
from flower_ext.algorithms.uldp.naive import UldpNaive
from flower_ext.federation.sums.weighted import weighted_sum
from flower_ext.secure.weighting.protocol import load_protocol

if TYPE_CHECKING:
    from flower_ext.secure.weighting.private_weighting import PrivateWeighting

__all__ = [
    "PrivateWeighting",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
    "theory_learning_rate",
    "weighted_sum",
]


def __getattr__(name: str) -> Any:
    """Import private weighting at first use, because it needs the extra ``weighting``."""
    if name != "PrivateWeighting":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load_protocol("paillier")
