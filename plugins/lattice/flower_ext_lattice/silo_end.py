"""A silo's end of private weighting over ring-LWE.

The server sends the weights with every round. A silo opens weights of a known epoch again, which
takes a fraction of a second, unless its process still holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting.party_ends import WEIGHTS, PartySiloEnd
from flower_ext.errors import ProtocolError
from flower_ext_lattice.messages import LatticeWeights, RoundOpening
from flower_ext_lattice.settings import LatticeSettings
from flower_ext_lattice.silo import LatticeSilo
from flower_ext_lattice.weighing import Weighing

OPENING = "opening"
"""Name of the array with the opening of a round."""


class LatticeSiloEnd(PartySiloEnd[LatticeSilo]):
    """A silo's end of one run."""

    protocol: ClassVar[str] = "lattice"
    party_type = LatticeSilo
    settings_type = LatticeSettings

    def open_sum(self, number: int, sent: Mapping[str, bytes]) -> LatticeOpenSum:
        """Begin this silo's sum of round ``number``; its epoch then counts as used."""
        silo, settings = self.silo, self.silo.settings
        opening = RoundOpening.from_bytes(sent[OPENING], settings)
        if opening.round_number != number:
            raise ProtocolError(f"round {opening.round_number}: expected round {number}")
        silo.receive_weights(LatticeWeights.from_bytes(sent[WEIGHTS], settings))
        return LatticeOpenSum(self, silo.begin(opening))

    def _added(self) -> bytes:
        return self.silo.answer_transfer().to_bytes()


class LatticeOpenSum:
    """A silo's sum of one round. It adds updates under encryption and keeps none."""

    def __init__(self, end: LatticeSiloEnd, weighing: Weighing) -> None:
        self._end, self._weighing = end, weighing

    def add(self, updates: Mapping[int, NDArray[np.float64]]) -> None:
        """Add updates of some users under encryption."""
        self._weighing.add(updates)

    def finish(self, noise: NDArray[np.float64]) -> bytes:
        """Return the masked sum; the round then counts as used."""
        masked = self._weighing.finish(noise)
        self._end.stay()
        return masked.to_bytes()
