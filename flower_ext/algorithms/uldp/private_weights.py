"""Weights that are in no party's hands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flower_ext.privacy.theorems.uldp import Weighting
from flower_ext.secure import ProtocolError


class PrivateWeights:
    """n_su / N_u, which no party can tell: there is nothing that the server could hand out."""

    weighting: Weighting = "by-records"
    needs_histogram = False

    def __init__(self, *, shown: Sequence[str]) -> None:
        self.shown = shown

    def prepare(self, histogram: np.ndarray | None, num_silos: int) -> None:
        """Nothing is known."""

    def of_users(self, users: Sequence[int]) -> np.ndarray:
        """Never called: weights travel under encryption."""
        raise ProtocolError("private weights are in no party's hands")
