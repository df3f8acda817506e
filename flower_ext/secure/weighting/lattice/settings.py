"""Public facts of one run of private weighting over ring-LWE, and what follows from them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from flower_ext.checks import require_at_least_one, require_positive
from flower_ext.errors import InvalidValue
from flower_ext.secure.weighting.lattice.layout import DEGREE

WEIGHT_BITS = 56
"""k: weights are multiples of 2⁻ᵏ."""
FRACTION_BITS = 30
"""b: coordinates are multiples of C · 2⁻ᵇ."""
ERROR_BOUND = 21
"""Largest magnitude of a sample of the centred binomial distribution, of variance 21/2."""
ERROR_VARIANCE = ERROR_BOUND / 2
SUM_LIMIT = 512
"""The sum of a coordinate is exact below this many clipping norms, and wraps above."""
CLIPPING_SLACK = 2.0**-20
"""Relative excess over the clipping norm that a silo accepts, and that the sensitivity counts."""

SECOND_WORD_BYTES = 8
"""Length of a word of c1."""
FIRST_WORD_BYTES = 6
"""Length of a word of c0: the two lowest bytes of a masked word of eight stay with the silo."""
STEP_BITS = 64 + WEIGHT_BITS - 96
"""A step of the encoding is 2²⁴ in words of 64 bits, and 2ᵏ modulo q, which has 96 bits."""

_TERNARY_VARIANCE = 2 / 3
_MOST_CHOICES = 2**16
"""Up to it an update times its count stays far below the primes."""
_NOISE_ROOM = 16.0
"""Standard deviations of noise that are accepted: a Gaussian exceeds them once in 10⁵⁷."""
_LARGEST_ADDED_DELTA = 1e-7


@dataclass(frozen=True, kw_only=True)
class LatticeSettings:
    """Public facts of one run of the protocol. Checked at construction.

    Parameters
    ----------
    run : str
        Name of the run, never used before: masks belong to it.
    users, silos, coordinates : int
        |U|, |S| (two at least), and the length d of an update.
    silo_record_limits : sequence of int
        The most records of one user in each silo. Mandatory, because a user with more records than
        all limits together would get another user's weight without anybody noticing.
    clipping_norm : float
        C: largest L2 norm of an update.
    noise_stddev : float
        Standard deviation of one silo's share of the noise, in each coordinate.
    rounds : int
        The most rounds that the run will have: statistical distances add up over them.

    Raises
    ------
    ValueError
        A field is out of range, the noise is too small to hide what the protocol adds to the sum
        (see `added_delta`), or so large that it alone could wrap a sum.
    """

    run: str
    users: int
    silos: int
    coordinates: int
    silo_record_limits: tuple[int, ...]
    clipping_norm: float
    noise_stddev: float
    rounds: int

    def __post_init__(self) -> None:
        if not self.run:
            raise InvalidValue("run='': expected a name that no other run has")
        for name in ("users", "coordinates", "rounds"):
            require_at_least_one(name, getattr(self, name))
        if self.silos < 2:
            raise InvalidValue(f"silos={self.silos!r}: expected an integer >= 2")
        require_positive("clipping_norm", self.clipping_norm)
        require_positive("noise_stddev", self.noise_stddev)
        self._check_limits()
        self._check_noise()

    @property
    def choices(self) -> int:
        """M: one more than the most records that a user may have."""
        return 1 + self.max_records_per_user

    @property
    def max_records_per_user(self) -> int:
        """N_max: the most records that a user may have over all silos."""
        return sum(self.silo_record_limits)

    @property
    def blocks(self) -> int:
        """Polynomials that hold an update."""
        return -(-self.coordinates // DEGREE)

    @property
    def step(self) -> float:
        """Distance of neighbouring encoded values."""
        return math.ldexp(self.clipping_norm, -FRACTION_BITS)

    @property
    def noise_bound(self) -> float:
        """Largest magnitude of one silo's noise in a coordinate that is accepted."""
        return _NOISE_ROOM * self.noise_stddev

    @property
    def sum_limit(self) -> float:
        """A coordinate of the sum wraps at this magnitude: the result is useless then, not unsafe.

        It is 512 C. The sum of a coordinate is at most C times the number of users plus the noise.
        """
        return SUM_LIMIT * self.clipping_norm

    @property
    def can_wrap(self) -> bool:
        """Return True where users and noise could reach `sum_limit`, all of them aligned."""
        largest = self.users * self.clipping_norm + self.silos * self.noise_bound
        return largest >= self.sum_limit

    def contribution_bound(self, clipping_norm: float) -> float:
        """Largest L2 norm by which one user who was drawn moves the sum.

        It is ``clipping_norm`` with the slack of clipping, and

        * 1.5 · √d steps: encoding moves a coordinate by half a step, and what the weighted sum has
          below a step changes the carry of the dither by one at most;
        * `error_bound`, for the errors e_u.
        """
        encoding = 1.5 * math.sqrt(self.coordinates) * self.step
        return clipping_norm * (1 + CLIPPING_SLACK) + encoding + self.error_bound

    @property
    def error_bound(self) -> float:
        """Largest L2 norm by which the errors e_u let a user move the sum, drawn or not.

        A product with e_u is at most 4096 · 21 times as long as its other factor, which is at most
        N_max · (C + √d steps) long, and counts in units of 2⁻ᵏ.
        """
        encoded = self.clipping_norm * (1 + CLIPPING_SLACK)
        encoded += 0.5 * math.sqrt(self.coordinates) * self.step
        return math.ldexp(self.max_records_per_user * encoded * DEGREE * ERROR_BOUND, -WEIGHT_BITS)

    @cached_property
    def rerandomising_delta(self) -> float:
        """Distance of the server's view from one without the errors of re-randomising.

        A silo adds r·e + e2·s, of a standard deviation of 240 units of 2⁻ᵏ steps. On top of it lie
        a dither that is uniform over one step and the silo's noise, so an error of t steps is at a
        total variation distance of t / (√(2π) σ) from none, where σ counts steps. Errors add up
        over coordinates and rounds.
        """
        variance = DEGREE * 2 * _TERNARY_VARIANCE * ERROR_VARIANCE
        steps = math.ldexp(math.sqrt(variance), -WEIGHT_BITS)
        one = steps / (math.sqrt(2 * math.pi) * self._noise_steps)
        return self.coordinates * self.rounds * one

    @cached_property
    def hint_delta(self) -> float:
        """Distance of the rounded results from results that do not depend on the server's secrets.

        What rounding c1 to words adds (ρ·s), the errors of re-randomising, and Σ V·e_u move a
        result by a fraction of a step, which one silo's noise hides. The Kullback-Leibler
        divergence of a rounded result is t² / (2 σ²); it adds up over coordinates and rounds.
        Counts all users at N_max with updates of full norm.
        """
        rounding = self.silos * DEGREE * _TERNARY_VARIANCE / 12
        words = math.ldexp(rounding, -2 * STEP_BITS)
        rerandomised = self.silos * DEGREE * 2 * _TERNARY_VARIANCE * ERROR_VARIANCE
        rerandomised = math.ldexp(rerandomised, -2 * WEIGHT_BITS)
        squared = self.coordinates * (words + rerandomised) + self.users * self._user_error
        return math.sqrt(self.rounds * squared) / (2 * self._noise_steps)

    @cached_property
    def undrawn_delta(self) -> float:
        """Distance, to who sees the rounded results, by which a user who is never drawn counts."""
        return math.sqrt(self.rounds * self._user_error) / (2 * self._noise_steps)

    @property
    def added_delta(self) -> float:
        """Sum of all statistical distances of the run: add it to δ."""
        return self.rerandomising_delta + self.hint_delta + self.undrawn_delta

    @property
    def upload_bytes(self) -> int:
        """Bytes of a silo's sum, but for a head of 28."""
        return FIRST_WORD_BYTES * self.coordinates + SECOND_WORD_BYTES * DEGREE * self.blocks

    @property
    def weights_bytes(self) -> int:
        """Bytes that each silo receives in every epoch, but for a head of 12."""
        return 12 * self.users * (DEGREE - 1 + self.choices)

    @cached_property
    def context(self) -> bytes:
        """Hash of all fields. Keys and masks derive from it: parties of different settings fail."""
        facts = json.dumps(["lattice weighting 1", asdict(self)], sort_keys=True)
        return hashlib.sha256(facts.encode()).digest()

    def record_limit(self, silo: int) -> int:
        """Return the most records that one user may have in ``silo``."""
        return self.silo_record_limits[silo]

    @property
    def _noise_steps(self) -> float:
        return self.noise_stddev / self.step

    @property
    def _user_error(self) -> float:
        """Expected squared length, in steps, of V·e_u for a user with N_max records."""
        length = math.ldexp(self.max_records_per_user, FRACTION_BITS - WEIGHT_BITS)
        return length**2 * DEGREE * ERROR_VARIANCE

    def _check_limits(self) -> None:
        limits: Sequence[int] | None = self.silo_record_limits
        whole = isinstance(limits, list | tuple) and all(type(limit) is int for limit in limits)
        if not limits or not whole or len(limits) != self.silos or min(limits) < 0:
            raise InvalidValue(
                f"silo_record_limits={limits!r}: expected {self.silos} integers >= 0, the most "
                "records of one user in each silo"
            )
        object.__setattr__(self, "silo_record_limits", tuple(limits))
        if not 1 <= sum(limits) < _MOST_CHOICES:
            raise InvalidValue(
                f"silo_record_limits={limits!r}: expected them to sum to 1 at least and "
                f"{_MOST_CHOICES - 1} at most"
            )

    def _check_noise(self) -> None:
        if self.added_delta > _LARGEST_ADDED_DELTA:
            raise InvalidValue(
                f"noise_stddev={self.noise_stddev!r} adds {self.added_delta:.1g} to δ: expected at "
                f"most {_LARGEST_ADDED_DELTA:g}; use more noise, fewer rounds={self.rounds} or "
                "smaller silo_record_limits"
            )
        if 10 * math.sqrt(self.silos) * self.noise_stddev >= self.sum_limit:
            raise InvalidValue(
                f"noise_stddev={self.noise_stddev!r} of {self.silos} silos: expected ten standard "
                f"deviations of their sum below {SUM_LIMIT} clipping norms, where a sum wraps"
            )
