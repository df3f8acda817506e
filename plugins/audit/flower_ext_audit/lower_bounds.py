"""Lower bounds on ε from samples of two worlds: runs without a canary, and runs with it.

=====================  =================================================  =======================
method                 what the bound uses                                holds for
=====================  =================================================  =======================
`by_rates`             rates of false and true positives at a threshold   every mechanism
`if_gaussian`          the shift μ of a Gaussian with these rates         Gaussian mechanisms only
=====================  =================================================  =======================

Sources: Clopper and Pearson (1934); Kairouz, Oh, Viswanath (2015) for rates under (ε, δ); Dong,
Roth, Su (2022) and Nasr et al. (2023) for μ. Some trials choose the threshold, and only the others
count for the bound. Several bounds hold at once by Bonferroni's inequality: each may fail with its
share of the failure probability.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flower_ext.checks import Checked, Count, FractionBelowOne, ProperFraction, require_delta
from flower_ext.errors import InvalidValue
from flower_ext.privacy import gaussian_loss

HELD_OUT = 0.25
"""Fraction of the trials that choose the threshold."""

RATES, GAUSSIAN = "rates (Clopper-Pearson)", "Gaussian shift (valid for Gaussian mechanisms only)"

_CANDIDATES = 500
"""Largest number of thresholds that are tried."""

_ROOT = 1e-8
"""Relative error by which a root finder may overshoot; the bound subtracts it."""

Scores = Sequence[float] | np.ndarray


@dataclass(frozen=True, kw_only=True)
class BoundTerms(Checked):
    """Parameters of a lower bound on ε, and the reported ε to compare it with.

    Parameters
    ----------
    delta : float
        δ of the ε, in [0, 1).
    confidence : float
        Probability that this bound and all others of its group hold at once.
    num_bounds : int
        Number of bounds in the group, which share the failure probability 1 − ``confidence``.
    reported : float
        ε that the mechanism reports at ``delta``; infinite if it reports none.
    """

    delta: FractionBelowOne
    confidence: ProperFraction
    num_bounds: Count = 1
    reported: float = math.inf

    @property
    def failure(self) -> float:
        """Largest probability with which one bound may be wrong."""
        return (1 - self.confidence) / self.num_bounds


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """A lower bound on the mechanism's ε; ``terms`` holds the δ and the confidence of the bound.

    ``epsilon`` is at least 0.
    """

    epsilon: float
    method: str
    terms: BoundTerms

    @property
    def ratio(self) -> float:
        """The lower bound divided by the reported ε; above 1, the reported guarantee is false."""
        if self.terms.reported > 0:
            return self.epsilon / self.terms.reported
        return math.inf if self.epsilon > 0 else 0.0

    @property
    def exceeds(self) -> bool:
        """True if the bound is above the ε that the mechanism reports."""
        return self.epsilon > self.terms.reported


def by_rates(without: Scores, present: Scores, terms: BoundTerms) -> LowerBound:
    """Bound ε by how well a threshold t on the score tells apart the two worlds.

    One test says "with the canary" if the score is above t, another if it is below t; the better
    one counts. If the mechanism is (ε, δ)-private, the rates of true and false positives of a test
    satisfy TPR ≤ e^ε FPR + δ. The same holds for the opposite test with the worlds exchanged.

    Parameters
    ----------
    without, present : array_like
        Scores of independent trials in the world without the canary, and with it.

    Raises
    ------
    ValueError
        A world has fewer than 8 trials, or a score is not finite.
    """

    def epsilon(fp: np.ndarray, tp: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            excess = tp - terms.delta
            # ``where`` evaluates both branches; the floor keeps the unused one finite.
            return np.where(excess > 0, np.log(np.maximum(excess, 1e-300) / fp), -math.inf)

    proved = _proved(without, present, terms, epsilon)
    return LowerBound(epsilon=max(0.0, proved), method=RATES, terms=terms)


def if_gaussian(without: Scores, present: Scores, terms: BoundTerms) -> LowerBound:
    """Bound the shift μ of a Gaussian mechanism from below, and return the ε that belongs to it.

    Every μ-Gaussian DP mechanism has μ ≥ Φ⁻¹(TPR) − Φ⁻¹(FPR) at every threshold, and its ε at δ is
    known exactly. For another mechanism, such as a sub-sampled one, the result may be too large.

    Parameters, errors
        As for `by_rates`; δ must be above 0.
    """
    from scipy import special

    def shift(fp: np.ndarray, tp: np.ndarray) -> np.ndarray:
        return np.asarray(special.ndtri(tp) - special.ndtri(fp))

    require_delta(terms.delta)
    mu, epsilon = _proved(without, present, terms, shift), 0.0
    if mu > 0:
        epsilon = gaussian_loss(1 / mu, releases=1, delta=terms.delta).epsilon * (1 - _ROOT)
    return LowerBound(epsilon=max(0.0, epsilon), method=GAUSSIAN, terms=terms)


def upper_rate(count: int | np.ndarray, trials: int, failure: float) -> np.ndarray:
    """Return Clopper and Pearson's upper bound on the probability of an event.

    The event occurred in ``count`` of ``trials`` independent trials. The bound is too low with
    probability ``failure`` at most.
    """
    from scipy import special

    count = np.asarray(count)
    rate = special.betainccinv(count + 1, np.maximum(trials - count, 0.5), failure)
    return np.where(count >= trials, 1.0, rate)


Pair = tuple[np.ndarray, np.ndarray]
Value = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _proved(without: Scores, present: Scores, terms: BoundTerms, value: Value) -> float:
    """Return the bound that the better of two tests proves: "score above t", or "score below t".

    The function ``value`` computes the bound, such as one on ε, from two rates of a test: its false
    positives and its true positives.
    """
    choosing, testing = _held_out(without, present)
    failure = terms.failure / 2  # two rates
    # The opposite test exchanges the worlds and negates the scores.
    _, threshold, sign = max(
        (*_best_threshold(*_turned(choosing, sign), failure, value), sign) for sign in (1, -1)
    )
    return float(value(*_rates(*_turned(testing, sign), threshold, failure)))


def _held_out(without: Scores, present: Scores) -> tuple[Pair, Pair]:
    """Divide each world's trials into two parts: one chooses the threshold, the other tests it.

    Return a pair (without, present) of first parts, and a pair of second parts.
    """
    choosing, testing = [], []
    for name, scores in (("without", without), ("present", present)):
        trials = np.asarray(scores, dtype=np.float64)
        if trials.ndim != 1 or len(trials) < 8:
            raise InvalidValue(f"{name}: expected the scores of at least 8 trials, one number each")
        if not np.isfinite(trials).all():
            raise InvalidValue(f"{name}: expected finite scores")
        count = math.ceil(HELD_OUT * len(trials))
        choosing.append(trials[:count])
        testing.append(trials[count:])
    return (choosing[0], choosing[1]), (testing[0], testing[1])


def _turned(worlds: Pair, sign: int) -> Pair:
    return worlds if sign > 0 else (-worlds[1], -worlds[0])


def _best_threshold(
    zero: np.ndarray, one: np.ndarray, failure: float, value: Value
) -> tuple[float, float]:
    """Return the largest bound that these trials prove, and the threshold that proves it.

    The rates are bounded as if only these trials existed, although the other, more numerous trials
    will test the threshold. Bounds for the larger number of trials would favour thresholds that
    look good because a few of these trials passed them by luck.
    """
    points = np.unique(np.concatenate([zero, one]))
    if len(points) == 1:
        return -math.inf, float(points[0])
    thresholds = (points[:-1] + points[1:]) / 2
    # More candidate thresholds would cost time and hardly raise the bound.
    if len(thresholds) > _CANDIDATES:
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, _CANDIDATES).astype(int)]
    proved = value(*_rates(zero, one, thresholds, failure))
    best = int(np.nanargmax(np.where(np.isnan(proved), -math.inf, proved)))
    return float(proved[best]), float(thresholds[best])


def _rates(
    zero: np.ndarray, one: np.ndarray, threshold: float | np.ndarray, failure: float
) -> Pair:
    """Bound the false-positive rate from above and the true-positive rate from below."""
    false, true = (
        len(scores) - np.searchsorted(np.sort(scores), threshold, side="right")
        for scores in (zero, one)
    )
    missed = upper_rate(len(one) - true, len(one), failure)
    return upper_rate(false, len(zero), failure), 1.0 - missed
