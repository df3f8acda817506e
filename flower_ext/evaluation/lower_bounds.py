"""Lower bounds on ε from samples: from a test between two worlds, or from a single run.

=====================  =================================================  =======================
method                 from                                               holds for
=====================  =================================================  =======================
`by_rates`             false and true positives of one threshold          every mechanism
`if_gaussian`          the same, as a shift μ of a Gaussian               Gaussian mechanisms only
`in_one_run`           guesses which of m canaries took part              every mechanism
=====================  =================================================  =======================

Sources: Clopper and Pearson (1934); Kairouz, Oh, Viswanath (2015) for rates under (ε, δ); Dong,
Roth, Su (2022) and Nasr et al. (2023) for μ; Steinke, Nasr, Jagielski (2023), Theorem 5.2, for one
run. Thresholds are chosen on trials that the bound then leaves out. Several bounds hold at once by
Bonferroni's inequality: each takes its share of the failure probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.privacy import gaussian_loss

HELD_OUT = 0.25
"""Share of the trials that choose the threshold."""

RATES, GAUSSIAN, ONE_RUN = (
    "rates (Clopper-Pearson)",
    "Gaussian shift (valid for Gaussian mechanisms only)",
    "one run (Steinke, Nasr, Jagielski 2023)",
)

_CANDIDATES = 500
"""Largest number of thresholds that are tried."""

_ROOT = 1e-8
"""Relative error by which a root finder may overshoot; the bound subtracts it."""


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """An ε that the mechanism is shown to exceed at ``delta``, with a confidence.

    Parameters
    ----------
    epsilon : float
        The bound, at least 0.
    confidence : float
        Probability with which this bound and the others of its group all hold.
    printed : float
        ε that the mechanism promises at ``delta``; infinite if it promises none.
    """

    epsilon: float
    delta: float
    method: str
    confidence: float
    printed: float = math.inf

    @property
    def ratio(self) -> float:
        """The lower bound divided by the printed ε; above 1, the printed guarantee is false."""
        if self.printed > 0:
            return self.epsilon / self.printed
        return math.inf if self.epsilon > 0 else 0.0

    @property
    def exceeds(self) -> bool:
        """True if the bound is above ``printed``, the ε that the mechanism promises."""
        return self.epsilon > self.printed


def by_rates(
    without: Sequence[float] | np.ndarray,
    present: Sequence[float] | np.ndarray,
    *,
    delta: float,
    confidence: float,
    together: int = 1,
    printed: float = math.inf,
) -> LowerBound:
    """Bound ε by the rates of the best test "the score is above t" or "below t".

    (ε, δ) implies TPR ≤ e^ε FPR + δ, and the same for the opposite test with the worlds exchanged.

    Parameters
    ----------
    without, present : array_like
        Scores of independent trials in the world without the canary, and with it.
    delta : float
        In [0, 1).
    confidence, printed
        See `LowerBound`.
    together : int
        Number of bounds that share the failure probability, 1 − ``confidence``.

    Raises
    ------
    ValueError
        A world has fewer than 8 trials, a score is not finite, or a parameter is out of range.
    """
    chosen, tried = _parts(without, present, delta, confidence, together)
    failure = (1 - confidence) / together / 2  # two rates

    def epsilon(fp: np.ndarray, tp: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(tp > delta, np.log(np.maximum(tp - delta, 1e-300) / fp), -math.inf)

    # The opposite test exchanges the worlds and negates the scores.
    _, threshold, sign = max(
        (*_best_threshold(*_turned(chosen, sign), failure, epsilon), sign) for sign in (1, -1)
    )
    found = epsilon(*_rates(*_turned(tried, sign), threshold, failure))
    best = max(0.0, float(found))
    return LowerBound(
        epsilon=best, delta=delta, method=RATES, confidence=confidence, printed=printed
    )


def if_gaussian(
    without: Sequence[float] | np.ndarray,
    present: Sequence[float] | np.ndarray,
    *,
    delta: float,
    confidence: float,
    together: int = 1,
    printed: float = math.inf,
) -> LowerBound:
    """Bound ε of a Gaussian mechanism by the shift μ that the rates of one threshold prove.

    Every μ-Gaussian DP mechanism has μ ≥ Φ⁻¹(TPR) − Φ⁻¹(FPR), and ε(δ) of that shift is exact. For
    another mechanism, such as a sub-sampled one, the result may be too large.

    Parameters, errors
        As of `by_rates`.
    """
    from scipy import special

    def shift(fp: np.ndarray, tp: np.ndarray) -> np.ndarray:
        return np.asarray(special.ndtri(tp) - special.ndtri(fp))

    if not delta > 0:
        raise InvalidValue(f"delta={delta!r}: expected a number in (0, 1) for a Gaussian mechanism")
    chosen, tried = _parts(without, present, delta, confidence, together)
    failure = (1 - confidence) / together / 2
    _, threshold = _best_threshold(*chosen, failure, shift)
    mu, epsilon = float(shift(*_rates(*tried, threshold, failure))), 0.0
    if mu > 0:
        epsilon = gaussian_loss(1 / mu, releases=1, delta=delta).epsilon * (1 - _ROOT)
    best = max(0.0, epsilon)
    return LowerBound(
        epsilon=best, delta=delta, method=GAUSSIAN, confidence=confidence, printed=printed
    )


def in_one_run(
    scores: Sequence[float] | np.ndarray,
    included: Sequence[bool] | np.ndarray,
    *,
    guesses: int,
    delta: float,
    confidence: float,
    together: int = 1,
    printed: float = math.inf,
) -> LowerBound:
    """Bound ε from one run with m canaries, each included by an independent fair coin.

    The attack guesses that the ``guesses`` / 2 highest scores are included and as many of the
    lowest are not. It abstains from the others.

    Parameters
    ----------
    scores : array_like
        One per canary (m,), higher if the canary seems to be included.
    included : array_like of bool
        The coins (m,).
    guesses : int
        Even, from 2 to m; it must be chosen before the scores are seen.
    delta, confidence, together, printed
        As of `by_rates`.

    Raises
    ------
    ValueError
        Shapes differ, or a parameter is out of range.
    """
    found, coins = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if found.ndim != 1 or found.shape != coins.shape or not np.isfinite(found).all():
        raise InvalidValue(
            f"scores of shape {found.shape}, included of shape {coins.shape}: expected one finite "
            "score and one coin per canary"
        )
    if not 2 <= guesses <= len(found) or guesses % 2:
        raise InvalidValue(f"guesses={guesses!r}: expected an even number from 2 to {len(found)}")
    _check(delta, confidence, together)
    order, half = np.argsort(found, kind="stable"), guesses // 2
    correct = int((~coins[order[:half]]).sum() + coins[order[-half:]].sum())
    failure = (1 - confidence) / together
    low, high = 0.0, 1.0
    while _chance(correct, guesses, len(found), high, delta) < failure and high < 1e3:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        proved = _chance(correct, guesses, len(found), middle, delta) < failure
        low, high = (middle, high) if proved else (low, middle)
    return LowerBound(
        epsilon=low, delta=delta, method=ONE_RUN, confidence=confidence, printed=printed
    )


def upper_rate(count: int | np.ndarray, trials: int, failure: float) -> np.ndarray:
    """Return a rate that the probability exceeds with chance ``failure`` at most.

    This is Clopper and Pearson's upper bound.
    """
    from scipy import special

    count = np.asarray(count)
    found = special.betainccinv(count + 1, np.maximum(trials - count, 0.5), failure)
    return np.where(count >= trials, 1.0, found)


def lower_rate(count: int | np.ndarray, trials: int, failure: float) -> np.ndarray:
    """Return a rate that the probability falls below with chance ``failure`` at most.

    This is Clopper and Pearson's lower bound.
    """
    return 1.0 - upper_rate(trials - np.asarray(count), trials, failure)


def _chance(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of so many correct guesses under (ε, δ) (Theorem 5.2)."""
    from scipy import stats

    accuracy = 1 / (1 + math.exp(-epsilon))
    at_least = float(stats.binom.sf(correct - 1, guesses, accuracy))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, at_least + 2 * canaries * delta * worst)


Pair = tuple[np.ndarray, np.ndarray]
Value = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _check(delta: float, confidence: float, together: int) -> None:
    if not 0 <= delta < 1:
        raise InvalidValue(f"delta={delta!r}: expected a number in [0, 1)")
    if not 0 < confidence < 1:
        raise InvalidValue(f"confidence={confidence!r}: expected a number in (0, 1)")
    require_at_least_one("together", together)


def _parts(
    without: Sequence[float] | np.ndarray,
    present: Sequence[float] | np.ndarray,
    delta: float,
    confidence: float,
    together: int,
) -> tuple[Pair, Pair]:
    """Return the trials that choose the threshold, and the others."""
    _check(delta, confidence, together)
    chosen, tried = [], []
    for name, scores in (("without", without), ("present", present)):
        all_of_it = np.asarray(scores, dtype=np.float64)
        if all_of_it.ndim != 1 or len(all_of_it) < 8:
            raise InvalidValue(f"{name}: expected the scores of at least 8 trials, one number each")
        if not np.isfinite(all_of_it).all():
            raise InvalidValue(f"{name}: expected finite scores")
        first = math.ceil(HELD_OUT * len(all_of_it))
        chosen.append(all_of_it[:first])
        tried.append(all_of_it[first:])
    return (chosen[0], chosen[1]), (tried[0], tried[1])


def _turned(worlds: Pair, sign: int) -> Pair:
    return worlds if sign > 0 else (-worlds[1], -worlds[0])


def _best_threshold(
    zero: np.ndarray, one: np.ndarray, failure: float, value: Value
) -> tuple[float, float]:
    """Return the largest value that these trials prove, and the threshold that proves it.

    Extrapolating to more trials would favour thresholds that few of these pass by luck.
    """
    points = np.unique(np.concatenate([zero, one]))
    if len(points) == 1:
        return -math.inf, float(points[0])
    thresholds = (points[:-1] + points[1:]) / 2
    if len(thresholds) > _CANDIDATES:
        thresholds = thresholds[np.linspace(0, len(thresholds) - 1, _CANDIDATES).astype(int)]
    proved = value(*_rates(zero, one, thresholds, failure))
    best = int(np.nanargmax(np.where(np.isnan(proved), -math.inf, proved)))
    return float(proved[best]), float(thresholds[best])


def _rates(
    zero: np.ndarray, one: np.ndarray, threshold: float | np.ndarray, failure: float
) -> Pair:
    """Bound the rates above each threshold: false positives from above, true ones from below."""
    false, true = (
        len(scores) - np.searchsorted(np.sort(scores), threshold, side="right")
        for scores in (zero, one)
    )
    return upper_rate(false, len(zero), failure), lower_rate(true, len(one), failure)
