"""Numbers of failures that a test of random runs allows."""

from scipy import stats


def not_refuted(failures: int, repetitions: int, allowed: float) -> bool:
    """Return True if so many failures, of probability ``allowed`` each, are plausible (10⁻⁶)."""
    return bool(stats.binom.sf(failures - 1, repetitions, allowed) > 1e-6)
