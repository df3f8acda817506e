"""Public settings of a run of private weighting over ring-LWE, with sizes and error bounds.

The bounds cover three errors. The encryption of user u's weight has the error e_u, which enters the
sum as V·e_u, where V is the user's encoded update times its number of records. Re-randomising a
silo's sum (c0, c1) adds r·e + e2·s, where s is the server's secret key, e the error in its public
key, and r and e2 are fresh. Rounding the words of c0 and c1 is the third error.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from flower_ext.checks import Count, Positive, are_integers
from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.keys_and_ciphers import KEY_BYTES
from flower_ext.secure.weighting.agreement import PartySettings
from flower_ext_lattice.layout import DEGREE
from flower_ext_lattice.six_byte_words import WORD_BYTES

NONCE_BYTES = 32
"""Length in bytes of the random bytes in every set of weights."""
WEIGHT_BITS = 56
"""k: weights are multiples of 2⁻ᵏ."""
FRACTION_BITS = 30
"""b: coordinates are multiples of C · 2⁻ᵇ."""
ERROR_BOUND = 21
"""Largest magnitude of a sample of the centred binomial distribution, of variance 21/2."""
ERROR_VARIANCE = ERROR_BOUND / 2
SUM_LIMIT = 512
"""Largest magnitude of a coordinate of the sum, in clipping norms; larger sums wrap."""
CLIPPING_SLACK = 2.0**-20
"""Relative excess over the clipping norm that a silo accepts. The sensitivity includes it."""

SECOND_WORD_BYTES = 8
"""Length in bytes of a word of c1."""
FIRST_WORD_BYTES = WORD_BYTES
"""Length in bytes of a word of c0. A masked word has eight bytes; the silo drops the lowest two."""
COUNT_BYTES = 4
"""Length in bytes of a masked count."""
STEP_BITS = 64 + WEIGHT_BITS - 96
"""A step of the encoding is 2ᵏ modulo q, which has 96 bits. Rounding to the modulus 2⁶⁴ turns the
step into 2²⁴: this constant is the 24."""

DRAW_TEXT_BYTES = 1 + KEY_BYTES
"""Length in bytes of the number and the key of one column of entries."""

_ROUNDED = 2.0**-7
"""Largest number of steps by which one silo's rounding moves a coordinate. A step is 2²⁴ in words.
The silo drops two bytes of a word (2⁻⁸ steps), and rounds words of c1 (2048 · 2⁻²⁴ steps). The
error r · e + e2 · s of re-randomising is below 2⁻³⁷ steps."""
_TERNARY_VARIANCE = 2 / 3
_MOST_CHOICES = 2**16
"""With fewer records per user than this, an update times its count stays below half a prime."""
_NOISE_ROOM = 16.0
"""Largest accepted noise in standard deviations; a Gaussian exceeds it once in 10⁵⁷ draws."""
_LARGEST_ADDED_DELTA = 1e-7


class UnsuitableNoise(InvalidValue):
    """The noise is too small to hide the protocol's own errors, or could alone wrap a sum."""


@dataclass(frozen=True, kw_only=True)
class LatticeSettings(PartySettings):
    """Public settings of one run of the protocol. Checked at construction.

    Parameters
    ----------
    run, users, silos, coordinates, draw_choices, winning_choices
        As for `PartySettings`; d is the number of coordinates.
    silo_record_limits : sequence of int
        The most records of one user in each silo. They are mandatory: a user with more records than
        all limits together would get a wrong weight, and nobody would notice.
    clipping_norm : float
        C: largest L2 norm of an update.
    noise_stddev : float
        Standard deviation of one silo's share of the noise, in each coordinate.
    rounds : int
        The most rounds that the run will have. Statistical distances add up over rounds.

    Raises
    ------
    ValueError
        A field is out of range.
    UnsuitableNoise
        The noise is too small to hide the protocol's own errors in the sum (see `added_delta`), or
        so large that it alone could wrap a sum.
    """

    kind = "lattice"

    silo_record_limits: tuple[int, ...]
    clipping_norm: Positive
    noise_stddev: Positive
    rounds: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_limits()
        self._check_noise()

    @property
    def table_size(self) -> int:
        """M = N_max + 1: a user's total number of records is one of M values, 0 to N_max."""
        return 1 + self.max_records_per_user

    @property
    def max_records_per_user(self) -> int:
        """N_max: the most records that a user may have over all silos."""
        return sum(self.silo_record_limits)

    @property
    def blocks(self) -> int:
        """Number of polynomials that hold an update."""
        return -(-self.coordinates // DEGREE)

    @property
    def step(self) -> float:
        """Distance between neighbouring encoded values."""
        return math.ldexp(self.clipping_norm, -FRACTION_BITS)

    @property
    def noise_bound(self) -> float:
        """Largest accepted magnitude of one silo's noise in a coordinate."""
        return _NOISE_ROOM * self.noise_stddev

    @property
    def sum_limit(self) -> float:
        """Magnitude at which a coordinate of the sum wraps: 512 C.

        A wrapped sum is useless, but reveals no more than the sum itself would. The sum of a
        coordinate is at most C times the number of users, plus the noise.
        """
        return SUM_LIMIT * self.clipping_norm

    @property
    def sensitivity(self) -> float:
        """Largest L2 distance by which one drawn user moves the decoded sum, in clipping norms.

        The distance is the sum of three parts:

        * ``clipping_norm``, with a slack for rounding in clipping.
        * 1.5 · √d steps. Encoding moves a coordinate by at most half a step. Adding the dither
          rounds the weighted sum to whole steps at random, which moves a coordinate by at most one
          step.
        * `error_bound`, for the errors e_u.
        """
        encoding = 1.5 * math.sqrt(self.coordinates) * self.step
        moved = self.clipping_norm * (1 + CLIPPING_SLACK) + encoding + self.error_bound
        return moved / self.clipping_norm

    @property
    def approximation_error(self) -> float:
        """Largest distance, in clipping norms, between the sum and a sum without the errors below.

        A sum without these errors reveals no secret. Given the dithers, an error of t steps in a
        coordinate moves its rounded sum by at most t + 1 steps. The errors e_u add at most
        `error_bound` for every user, drawn or not. Rounding and re-randomising add less than 2⁻⁷
        steps per silo. The noise of all |S| silos is √|S| times as large as one silo's share. One
        silo's share alone must hide these errors, so this property multiplies their sum by √|S|.
        """
        carries = (1 + self.silos * _ROUNDED) * math.sqrt(self.coordinates) * self.step
        errors = self.users * self.error_bound
        return math.sqrt(self.silos) * (carries + errors) / self.clipping_norm

    @property
    def error_bound(self) -> float:
        """Largest L2 norm by which a user, drawn or not, moves the sum through the errors e_u.

        The product V·e_u is at most 4096 · 21 times as long as V, and V is at most
        N_max · (C + √d / 2 steps) long. The product counts in units of 2⁻ᵏ.
        """
        encoded = self.clipping_norm * (1 + CLIPPING_SLACK)
        encoded += 0.5 * math.sqrt(self.coordinates) * self.step
        return math.ldexp(self.max_records_per_user * encoded * DEGREE * ERROR_BOUND, -WEIGHT_BITS)

    @cached_property
    def rerandomising_delta(self) -> float:
        """Statistical distance of the server's view from one without the errors of re-randomising.

        A silo adds the error r·e + e2·s, with a standard deviation of 240 · 2⁻ᵏ steps. It also adds
        its noise and a dither that is uniform over one step. An error of t steps therefore moves
        the distribution by a total variation distance of t / (√(2π) σ), where σ counts steps.
        Distances add up over coordinates and rounds.
        """
        variance = DEGREE * 2 * _TERNARY_VARIANCE * ERROR_VARIANCE
        steps = math.ldexp(math.sqrt(variance), -WEIGHT_BITS)
        distance = steps / (math.sqrt(2 * math.pi) * self._noise_steps)
        return self.coordinates * self.rounds * distance

    @cached_property
    def hint_delta(self) -> float:
        """Statistical distance by which the server's secrets move the rounded results.

        Three errors move a result by a fraction t of a step: the rounding error of c1 times s, the
        errors of re-randomising, and Σ V·e_u. One silo's noise, of σ steps, hides this fraction.
        The Kullback-Leibler divergence of a rounded result is t² / (2 σ²), and adds up over
        coordinates and rounds. The bound assumes that all users have N_max records and updates of
        full norm.
        """
        rounding = self.silos * DEGREE * _TERNARY_VARIANCE / 12
        words = math.ldexp(rounding, -2 * STEP_BITS)
        rerandomised = self.silos * DEGREE * 2 * _TERNARY_VARIANCE * ERROR_VARIANCE
        rerandomised = math.ldexp(rerandomised, -2 * WEIGHT_BITS)
        squared = self.coordinates * (words + rerandomised) + self.users * self._user_error
        return math.sqrt(self.rounds * squared) / (2 * self._noise_steps)

    @cached_property
    def undrawn_delta(self) -> float:
        """Statistical distance by which a user who is never drawn moves the rounded results."""
        return math.sqrt(self.rounds * self._user_error) / (2 * self._noise_steps)

    @property
    def added_delta(self) -> float:
        """Sum of the run's statistical distances, at most 1e-7; ε counts `approximation_error`."""
        return self.rerandomising_delta + self.hint_delta + self.undrawn_delta

    @property
    def num_columns(self) -> int:
        """Number of columns of a user's entries: two if the draw is secret, else one."""
        return 1 if self.draw_choices is None else 2

    @property
    def count_bytes(self) -> int:
        """Length in bytes of a masked count."""
        return COUNT_BYTES

    def check_round(self, number: int, last: int) -> None:
        """Also refuse a round beyond ``rounds``, because statistical distances add up."""
        super().check_round(number, last)
        if number > self.rounds:
            raise ProtocolError(
                f"round {number}: expected at most rounds={self.rounds} of the settings"
            )

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
        if not are_integers(limits, least=0) or len(limits) != self.silos:
            raise InvalidValue(
                f"silo_record_limits={limits!r}: expected {self.silos} integers >= 0, the most "
                "records of one user in each silo"
            )
        object.__setattr__(self, "silo_record_limits", tuple(limits))
        if not 1 <= sum(limits) < _MOST_CHOICES:
            raise InvalidValue(
                f"silo_record_limits={limits!r}: expected a sum from 1 to {_MOST_CHOICES - 1}"
            )

    def _check_noise(self) -> None:
        if self.added_delta > _LARGEST_ADDED_DELTA:
            raise UnsuitableNoise(
                f"noise_stddev={self.noise_stddev!r} does not hide the protocol's own errors: over "
                f"{self.rounds} rounds they change what the server sees by a statistical distance "
                f"of {self.added_delta:.1g}, expected at most {_LARGEST_ADDED_DELTA:g}; use more "
                "noise, fewer rounds, or smaller silo_record_limits"
            )
        if 10 * math.sqrt(self.silos) * self.noise_stddev >= self.sum_limit:
            raise UnsuitableNoise(
                f"noise_stddev={self.noise_stddev!r} at {self.silos} silos: expected ten standard "
                f"deviations of the summed noise below {SUM_LIMIT} clipping norms, where sums "
                "wrap; use less noise or a larger clipping_norm"
            )
