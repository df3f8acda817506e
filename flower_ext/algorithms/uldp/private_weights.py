"""Settings of private weighting, and weights that are in no party's hands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flower_ext.errors import InvalidValue
from flower_ext.privacy import PoissonSampling, ReleasePlan
from flower_ext.privacy.theorems.uldp import Weighting
from flower_ext.secure import ProtocolError, WeightingSettings


@dataclass(frozen=True, kw_only=True)
class PrivateWeighting:
    """Settings of the protocol. What could overflow is refused before anything is encrypted.

    Parameters
    ----------
    max_records_per_user : int
        N_max: the most records that one user may have over all silos.
    allowed_totals : tuple of int, optional
        If given, every user has one of these numbers of records over all silos, or none: less work.
    silo_record_limits : tuple of int, optional
        The most records of one user in each silo. Where they sum to N_max at most, no user can
        exceed it; without them an excess ends the run when the first sum is decrypted.
    precision : float
        P: largest error of a coordinate of the sum over silos. The method refuses one that is
        coarse against the silos' noise.
    draw_choices : int, optional
        If given, users are drawn by 1-out-of-``draw_choices`` oblivious transfer: no party learns
        who takes part, so that drawing amplifies against the server as well. The plan's
        ``sampling_rate`` has to be a multiple of 1 / ``draw_choices``.
    key_bits : int
        Length of the Paillier modulus.
    allow_insecure_key_size : bool
        For tests and simulation; silos that refuse seeded noise refuse small keys.

    Raises
    ------
    ValueError
        A field is out of range.
    """

    max_records_per_user: int = 2000
    allowed_totals: tuple[int, ...] | None = None
    silo_record_limits: tuple[int, ...] | None = None
    precision: float = 1e-10
    draw_choices: int | None = None
    key_bits: int = 3072
    allow_insecure_key_size: bool = False

    def __post_init__(self) -> None:
        silos = 2 if self.silo_record_limits is None else len(self.silo_record_limits)
        facts = {"users": 1, "silos": silos, "coordinates": 1}
        bounds = {"update_bound": self.precision, "noise_bound": self.precision}
        self.settings(run="check", **facts, **bounds)

    @property
    def assumed_totals(self) -> str:
        """What no silo can check, as it knows its own records only; empty where there is nothing.

        A total that is not foreseen shows in a sum out of bounds, on which a server may try totals.
        """
        if self.allowed_totals is not None:
            totals = " or ".join(str(total) for total in self.allowed_totals)
            foreseen = f"{totals} records over all silos, or none"
        elif self.silo_record_limits is None:
            foreseen = f"at most {self.max_records_per_user} records over all silos"
        else:
            return ""
        return (
            f"every user has {foreseen}: otherwise the run ends, and the server may find that "
            "user's number of records"
        )

    def settings(self, **facts: Any) -> WeightingSettings:
        """The public facts of one run.

        Raises
        ------
        ValueError
            As `WeightingSettings`.
        """
        return WeightingSettings(**asdict(self), **facts)

    def draw_hits(self, plan: ReleasePlan) -> int:
        """How many of a user's ``draw_choices`` stand for taking part.

        Raises
        ------
        ValueError
            ``plan`` draws nobody, or at a rate that is no multiple of 1 / ``draw_choices``.
        """
        choices, sampling = self.draw_choices, plan.sampling
        if choices is None:
            return 1
        rate = sampling.rate if isinstance(sampling, PoissonSampling) else 1.0
        hits = round(rate * choices)
        if not (0 < hits < choices and abs(rate - hits / choices) < 1e-12):
            raise InvalidValue(
                f"draw_choices={choices}: users are drawn at a rate of {rate:g}, expected a "
                f"multiple of 1/{choices} below 1"
            )
        return hits


class PrivateWeights:
    """n_su / N_u, which no party can tell: there is nothing that the server could hand out."""

    weighting: Weighting = "by-records"
    needs_histogram = False

    def __init__(self, *, hidden_draw: bool = False) -> None:
        drawn = "which places of the silos' secret order of users were drawn: the server"
        self.shown: Sequence[str] = (
            "how many users have no record in any silo (not which): the server",
            *(() if hidden_draw else (drawn,)),
            "how long a silo takes, which grows with the number of its users: whoever times it",
        )

    def prepare(self, histogram: np.ndarray | None, num_silos: int) -> None:
        """Nothing is known."""

    def of_users(self, users: Sequence[int]) -> np.ndarray:
        """Never called: weights travel under encryption."""
        raise ProtocolError("private weights are in no party's hands")
