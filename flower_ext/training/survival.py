"""Cox's partial likelihood, as a loss of risk scores."""

from __future__ import annotations

import torch
from torch import Tensor


def cox_loss(scores: Tensor, targets: Tensor, present: Tensor | None = None) -> Tensor:
    """Return the negative log partial likelihood per event, with Breslow's rule for ties.

    At each event, the loss compares the patient's score with the scores of all patients who are
    still observed. It is therefore no mean over examples, and a mini-batch of one patient has
    nothing to compare. Without events the loss and its gradient are 0. No control flow depends on
    the data.

    FLamby divides by the number of patients instead of events, so its gradients, and its steps of
    SGD, are smaller than here: the factor is the share of patients with an event.

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
    # Every row, even padding, is at risk with itself, because an empty sum would have no gradient.
    at_risk = at_risk | torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    risks = torch.where(at_risk, scores.unsqueeze(0), -torch.inf)
    losses = torch.logsumexp(risks, dim=1) - scores
    return (losses * event).sum() / event.sum().clamp(min=1)
