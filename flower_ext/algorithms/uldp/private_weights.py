"""Weights that no party knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flower_ext.privacy.theorems.uldp import Weighting
from flower_ext.secure import ProtocolError


class PrivateWeights:
    """The weights n_su / N_u, which no party knows, so the server cannot send them."""

    weighting: Weighting = "by-records"
    needs_histogram = False

    def __init__(self, *, shown: Sequence[str]) -> None:
        self.shown = shown

    def prepare(self, histogram: np.ndarray | None, num_silos: int) -> None:
        """Do nothing, because the weights stay unknown."""

    def of_users(self, users: Sequence[int]) -> np.ndarray:
        """Raise an error. Nobody calls this, because weights are sent under encryption."""
        raise ProtocolError("private weights are known to no party: expected encrypted weights")
