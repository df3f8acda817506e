"""Sums of updates that are all at hand, added one by one as a round does."""

from flower_ext.privacy.mechanisms.bounds import BoundedSum, ClippedSum
from flower_ext.privacy.mechanisms.updates import RunningSum


def added(summed: RunningSum, updates):
    """Return a sum to which the updates were added."""
    for update in updates:
        summed.add(update)
    return summed


def sum_clipped(updates, clipping_norm, *, like):
    """Return the sum of clipped updates, with its bound."""
    summed = added(ClippedSum(like, clipping_norm), updates)
    return BoundedSum(value=summed.value, bound=summed.bound, count=summed.count)


def aggregate(mechanism, uploads, *, like, cohort_size, noise):
    """Return what a mechanism releases from the uploads of a round."""
    summed = added(mechanism.begin_sum(like), uploads)
    return mechanism.aggregate(summed, cohort_size=cohort_size, noise=noise)
