"""The loss and the metric of survival times."""

import math

import torch
from torch import Tensor


def cox_loss(scores: Tensor, targets: Tensor, present: Tensor | None = None) -> Tensor:
    """Return the negative log partial likelihood per event, with Breslow's rule for ties.

    At each event, the loss compares the patient's score with the scores of all patients who are
    still observed. It is therefore no mean over examples, and a mini-batch of one patient has
    nothing to compare. Without events the loss and its gradient are 0. No control flow depends on
    the data.

    FLamby divides by the number of patients instead of events. FLamby's gradients and steps of SGD
    are therefore those of this loss, times the share of patients with an event.

    Parameters
    ----------
    scores : Tensor
        Logarithms of the risks (n,) or (n, 1).
    targets : Tensor
        (n, 2): time, and 1 for an event or 0 for the end of observation.
    present : Tensor, optional
        Booleans (n,). Rows with False are padding and change nothing.
    """
    scores = scores.flatten()
    time, event = targets[:, 0], targets[:, 1].to(scores.dtype)
    at_risk = time.unsqueeze(0) >= time.unsqueeze(1)
    if present is not None:
        at_risk = at_risk & present.unsqueeze(0)
        event = event * present
    # Every row, even padding, counts itself as at risk: an empty sum would have no gradient.
    at_risk = at_risk | torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    risks = torch.where(at_risk, scores.unsqueeze(0), -torch.inf)
    losses = torch.logsumexp(risks, dim=1) - scores
    return (losses * event).sum() / event.sum().clamp(min=1)


def concordance_index(scores: Tensor, targets: Tensor) -> float:
    """Return Harrell's concordance index: the fraction of comparable pairs in the right order.

    Two patients are comparable if one patient had the event while the other was still observed. If
    both times are equal, the patient without the event counts as observed for longer. A pair is in
    the right order if the patient with the event has the higher score. Equal scores count half. The
    result is NaN if no pair is comparable, or if a value is NaN.

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
