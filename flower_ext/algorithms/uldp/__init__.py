"""Uldp-FL: silos with users in common, and user-level DP across them.

Source: Kato, Xiong, Takagi, Cao, Yoshikawa, "Uldp-FL: Federated Learning with Across-Silo
User-Level Differential Privacy" (PVLDB 2024).
"""

from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd, theory_learning_rate
from flower_ext.algorithms.uldp.group import UldpGroup
from flower_ext.algorithms.uldp.naive import UldpNaive
from flower_ext.algorithms.uldp.weights import EqualWeights, WeightsByRecords, WeightSource

__all__ = [
    "EqualWeights",
    "UldpAvg",
    "UldpGroup",
    "UldpNaive",
    "UldpSgd",
    "WeightSource",
    "WeightsByRecords",
    "theory_learning_rate",
]
