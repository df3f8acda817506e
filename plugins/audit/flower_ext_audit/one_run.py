"""Lower bounds on ε from one run with m canaries, each included by an independent fair coin.

The attack guesses the coins of c' canaries, and c of these guesses are correct.

============================  ==========================================  ==========================
bound                         largest chance of c correct guesses         holds for
============================  ==========================================  ==========================
`in_one_run`                  under (ε, δ) (Theorem 5.2 of Steinke,       every mechanism
                              Nasr, Jagielski 2023)
`in_one_run_by_curve`         under a trade-off curve f (Mahloujifar,     mechanisms of a family,
                              Melis, Chaudhuri 2024)                      by default Gaussian ones
============================  ==========================================  ==========================

Both bounds grow with c. So each is wrong only if c reaches a certain number, an event of
probability 1 − ``confidence`` at most. If at least one is wrong, c has reached the smaller of the
two numbers. Both bounds therefore hold at once with this confidence, without Bonferroni's
inequality.

`refutes` bounds the chance of c correct guesses as follows. Let p_i be the probability of exactly i
correct guesses, and the *tail* P_i the probability of at least i. For one canary, consider the
event that its guess is correct and that at least i of all guesses are correct. Flip its coin and
keep the output: now its guess is wrong, and at least i − 1 guesses are correct. The worlds before
and after the flip are neighbours. If an event has the probability y in one world, let L(y) be the
least probability that it can have in a neighbouring world; L is convex. By Jensen's inequality, the
mean over canaries and coins gives

    Σ_{l ≥ i−1} (c' − l) p_l / m  ≥  L( Σ_{l ≥ i} l p_l / m ).

In terms of tails, with R_i = (i − 1) P_i + Σ_{l ≥ i} P_l for the sum on the right,

    (c' − i + 1) P_{i−1}  ≥  Σ_{l ≥ i} P_l + m L(R_i / m).

The right side grows with every tail. So start from P_c = τ and from tails of 0 above c: the
recursion gives the smallest possible P_{c−1}, …, P_0 for any P_c ≥ τ. If this P_0 exceeds 1, then
P_c < τ.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from flower_ext.checks import require_delta
from flower_ext.errors import InvalidValue
from flower_ext_audit.lower_bounds import BoundTerms, LowerBound, Scores

ONE_RUN, ONE_RUN_BY_CURVE = (
    "one run (Steinke, Nasr, Jagielski 2023)",
    "one run, trade-off curve (Mahloujifar, Melis, Chaudhuri 2024)",
)

LeastChance = Callable[[float], float]
"""A trade-off curve f as the function L(y) = f(1 − y): the least probability that an event has in
one world if it has the probability y in a neighbouring world. Convex, and the same for both orders
of the worlds."""

_ROUNDING = 1e-9
"""Relative error of the recursion, and of a found noise multiplier; the bounds include them."""


def in_one_run(
    scores: Scores, included: Sequence[bool] | np.ndarray, terms: BoundTerms, *, guesses: int
) -> LowerBound:
    """Bound ε from one run with m canaries, each included by an independent fair coin.

    The attack guesses that the ``guesses`` / 2 canaries with the highest scores are included, and
    that the ``guesses`` / 2 canaries with the lowest scores are not. It makes no other guesses.

    Parameters
    ----------
    scores : array_like
        One score per canary (m,). A high score means that the canary seems to be included.
    included : array_like of bool
        The coins (m,): True for a canary that was included.
    guesses : int
        Even, from 2 to m. Choose it before you see the scores.

    Raises
    ------
    ValueError
        Shapes differ, or a parameter is out of range.
    """
    correct, canaries = _correct_guesses(scores, included, guesses)

    def refuted(epsilon: float) -> bool:
        return _chance(correct, guesses, canaries, epsilon, terms.delta) < terms.failure

    return LowerBound(epsilon=_largest_refuted(refuted), method=ONE_RUN, terms=terms)


def gaussian_curve(epsilon: float, delta: float) -> LeastChance:
    """Return the trade-off curve of the least noisy Gaussian mechanism that is (ε, δ)-private."""
    import dp_accounting
    from scipy import special

    shift = (1 + _ROUNDING) / dp_accounting.get_sigma_gaussian(epsilon, delta)
    return lambda chance: float(special.ndtr(special.ndtri(chance) - shift))


def profile_curve(epsilons: Sequence[float], deltas: Sequence[float]) -> LeastChance:
    """Return the trade-off curve of a mechanism that is (ε, δ)-private for each of these pairs.

    Parameters
    ----------
    epsilons, deltas : Sequence[float]
        Pairs from an accountant, for instance. A pair must hold for both orders of the two worlds,
        so take the larger δ of the two for each ε. More pairs make the curve and the bound tighter,
        but every choice is valid.
    """
    shrink, subtracted = np.exp(-np.asarray(epsilons)), np.asarray(deltas)

    def least(chance: float) -> float:
        event = shrink * (chance - subtracted)
        # The same pair, applied to the complement of the event.
        complement = 1 - subtracted - (1 - chance) / shrink
        return max(0.0, float(event.max()), float(complement.max()))

    return least


def in_one_run_by_curve(
    scores: Scores,
    included: Sequence[bool] | np.ndarray,
    terms: BoundTerms,
    *,
    guesses: int,
    family: Callable[[float, float], LeastChance] = gaussian_curve,
) -> LowerBound:
    """Bound ε from one run, for a mechanism whose trade-off curve belongs to a known family.

    The bound is usually larger than that of `in_one_run`. If the mechanism's curve is not in the
    family, the bound may be too large. Sub-sampled mechanisms are not in the default family.

    Parameters
    ----------
    family : Callable[[float, float], LeastChance]
        Takes ε and δ, and returns the curve of the family's mechanism that has this ε at this δ.
        The curve's values must fall as ε grows.

    Other parameters, errors
        As for `in_one_run`; δ must be above 0.
    """
    require_delta(terms.delta)
    correct, canaries = _correct_guesses(scores, included, guesses)

    def refuted(epsilon: float) -> bool:
        return refutes(correct, guesses, canaries, family(epsilon, terms.delta), terms.failure)

    return LowerBound(epsilon=_largest_refuted(refuted), method=ONE_RUN_BY_CURVE, terms=terms)


def refutes(correct: int, guesses: int, canaries: int, least: LeastChance, failure: float) -> bool:
    """Return True if the chance of at least ``correct`` correct guesses is below ``failure``.

    ``least`` is the mechanism's trade-off curve. The attack guesses the coins of ``guesses`` of the
    ``canaries`` canaries.
    """
    tail = tails = failure  # P_i, and the sum of P_l over l >= i
    for number in range(correct, 0, -1):
        weighted = (number - 1) * tail + tails
        wrong = tails + canaries * least(min(1.0, weighted / canaries))
        tail = max(tail, wrong / (guesses - number + 1))
        if tail > 1 + _ROUNDING:
            return True
        tails += tail
    return False


def _correct_guesses(
    scores: Scores, included: Sequence[bool] | np.ndarray, guesses: int
) -> tuple[int, int]:
    """Return the number of correct guesses, and the number of canaries."""
    scores, coins = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if scores.ndim != 1 or scores.shape != coins.shape or not np.isfinite(scores).all():
        raise InvalidValue(
            f"scores of shape {scores.shape}, included of shape {coins.shape}: expected one finite "
            "score and one coin per canary"
        )
    canaries = len(scores)
    if not 2 <= guesses <= canaries or guesses % 2:
        raise InvalidValue(f"guesses={guesses!r}: expected an even number from 2 to {canaries}")
    order, half = np.argsort(scores, kind="stable"), guesses // 2
    correct = int((~coins[order[:half]]).sum() + coins[order[-half:]].sum())
    return correct, canaries


def _largest_refuted(refuted: Callable[[float], bool]) -> float:
    # ``low`` is 0 or an ε that the guesses refute, so the search never returns too large a bound.
    low, high = 0.0, 1.0
    while refuted(high) and high < 1e3:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _chance(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """Return the largest chance of at least ``correct`` correct guesses (Theorem 5.2)."""
    from scipy import stats

    accuracy = 1 / (1 + math.exp(-epsilon))
    at_least = float(stats.binom.sf(correct - 1, guesses, accuracy))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, accuracy))
    worst = float((below / np.arange(1, correct + 1)).max(initial=0.0))
    return min(1.0, at_least + 2 * canaries * delta * worst)
