"""FedRep: in each round a client trains its own head first, then the shared representation.

Source: Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized
Federated Learning" (ICML 2021), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
φ, h_i                shared representation (``arrays``), head (client memory)
n, r                  ``plan.sampling``: ``population``, ``sampling_rate``
τ_h                   ``head.epochs`` (or ``steps``), with φ frozen
τ_φ                   ``extractor.epochs`` (or ``steps``), with h_i frozen
α                     ``head.learning_rate``, ``extractor.learning_rate``
====================  =====================================================

With a `NonPrivatePlan`, `FedRep` is the paper's method. CENTAUR is the same method under
client-level DP, so `FedRep` is a subclass of `Centaur`.
"""

from __future__ import annotations

from dataclasses import dataclass

from flower_ext.algorithms.dp2_fedsam import Centaur
from flower_ext.training import LocalTraining


@dataclass(frozen=True, kw_only=True)
class FedRep(Centaur):
    """Personal heads on a shared representation, both trained by plain SGD as in `Centaur`.

    Only the defaults differ from `Centaur`: a client trains its head for ten epochs and the
    representation for one. Both classes accept the plans that `FedPer` accepts.
    """

    head: LocalTraining = LocalTraining(epochs=10)
    extractor: LocalTraining = LocalTraining(epochs=1)
