"""Concordance of risk scores with the order of survival times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def concordance_index(scores: Tensor, targets: Tensor) -> float:
    """Return Harrell's concordance index: the share of comparable pairs in the right order.

    Two patients are comparable if one had the event while the other was still observed. At equal
    times, the patient whose observation ended counts as the longer observed. The patient with the
    event should have the higher score; equal scores count half. The result is NaN if no pair is
    comparable, or if a value is NaN.

    Parameters
    ----------
    scores : Tensor
        Risks (n,) or (n, 1), on any increasing scale.
    targets : Tensor
        (n, 2): time, and 1 for an event or 0 for the end of observation.
    """
    scores = scores.flatten()
    if scores.isnan().any() or targets.isnan().any():
        return math.nan
    time, event = targets[:, 0], targets[:, 1] > 0
    longer = (time.unsqueeze(0) > time.unsqueeze(1)) | (
        (time.unsqueeze(0) == time.unsqueeze(1)) & ~event.unsqueeze(0)
    )
    comparable = event.unsqueeze(1) & longer
    pairs = int(comparable.sum())
    if pairs == 0:
        return math.nan
    first, second = scores.unsqueeze(1), scores.unsqueeze(0)
    right = (comparable & (first > second)).sum() + 0.5 * (comparable & (first == second)).sum()
    return float(right) / pairs
