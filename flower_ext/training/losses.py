"""A loss and a metric for tasks, beside those of `torch.nn.functional`."""

from __future__ import annotations

import torch
from torch import Tensor

from flower_ext.errors import InvalidValue


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Return the fraction of rows of ``outputs`` (n, classes) whose largest entry is the target.

    Raises
    ------
    ValueError
        Outputs or targets are not a single tensor, or targets are not class numbers.
    """
    for name, tree in (("outputs", outputs), ("targets", targets)):
        if not isinstance(tree, Tensor):
            raise InvalidValue(
                f"accuracy with {name} of type {type(tree).__name__}: expected one tensor. Give "
                "Task(metrics={...}) a metric that reads your type, such as lambda outputs, "
                "targets: accuracy(outputs.logits, targets)"
            )
    if targets.is_floating_point():
        raise InvalidValue(
            f"accuracy with targets of type {targets.dtype}: expected class numbers. Give "
            "Task(metrics={...}) a metric that suits your targets"
        )
    return float((outputs.argmax(dim=1) == targets).float().mean())


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
