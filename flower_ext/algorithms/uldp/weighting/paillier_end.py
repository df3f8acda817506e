"""A silo's end of Protocol 1 over Paillier."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting.party_ends import WEIGHTS, PartySiloEnd
from flower_ext.errors import ProtocolError
from flower_ext.federation import Question, Remaining
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.paillier import ZeroPool
from flower_ext.secure.weighting.paillier_messages import EncryptedWeights, SealedWeights
from flower_ext.secure.weighting.weighting_silo import WeightingSilo

_POOL_PAYS = 2
"""Least ratio of a round's re-randomised ciphertexts to a pool's set-up for which a pool pays."""
_pools: OrderedDict[str, ZeroPool] = OrderedDict()
"""Pool of zeros of the last run, which all silos of this process share."""


def pool_pays(settings: WeightingSettings) -> bool:
    """Return True if a pool of zeros pays off within one round."""
    share = math.ceil(settings.ciphertexts / settings.silos)
    return share >= _POOL_PAYS * ZeroPool.size(settings.key_bits)


class PaillierSiloEnd(PartySiloEnd[WeightingSilo]):
    """A silo's end of one run."""

    protocol: ClassVar[str] = "paillier"
    party_type = WeightingSilo
    settings_type = WeightingSettings

    @classmethod
    def _admit(cls, settings: WeightingSettings, question: Question) -> None:
        if settings.allow_insecure_key_size and not question.may_simulate:
            raise PermissionError(
                f"the server asks for keys of {settings.key_bits} bits that may be insecure: this "
                "client takes part only in simulation (client_app(..., allow_seeded_noise=True))"
            )

    def open_sum(self, number: int, sent: Mapping[str, bytes]) -> PaillierOpenSum:
        """Begin this silo's sum of round ``number``."""
        kind = EncryptedWeights if self.silo.settings.draw_choices is None else SealedWeights
        weights = kind.from_bytes(sent[WEIGHTS], self.silo.settings)
        if weights.round_number != number:
            raise ProtocolError(f"weights of round {weights.round_number}: expected round {number}")
        return PaillierOpenSum(self, weights)


class PaillierOpenSum:
    """A silo's sum of one round. It needs all updates at once, because it works by coordinates."""

    def __init__(self, end: PaillierSiloEnd, weights: EncryptedWeights | SealedWeights) -> None:
        self._end, self._weights = end, weights
        self._updates: dict[int, NDArray[np.float64]] = {}

    def add(self, updates: Mapping[int, NDArray[np.float64]]) -> None:
        """Keep updates until all users' updates have arrived."""
        self._updates |= updates

    def finish(self, noise: NDArray[np.float64]) -> bytes:
        """Return the masked sum; the round then counts as used."""
        silo, number = self._end.silo, self._weights.round_number
        _prepare(silo)
        progress = Remaining(f"silo {silo.index}, round {number}: coordinates")
        masked = silo.weigh(self._weights, self._updates, noise, progress=progress)
        self._end.stay()
        return masked.to_bytes()


def _prepare(silo: WeightingSilo) -> None:
    """Set up a pool of zeros if it pays off, shared with the other silos of this process."""
    settings = silo.settings
    if silo.prepared or not pool_pays(settings):
        return
    name = f"silo {silo.index}: pool of zeros"
    pool = silo.prepare(_pools.get(settings.run), progress=Remaining(name))
    _pools.clear()
    _pools[settings.run] = pool
