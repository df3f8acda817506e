"""Ranking metrics for two classes, of which one may be rare."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from flower_ext.errors import InvalidValue

if TYPE_CHECKING:
    from torch import Tensor


def roc_auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve.

    It is the probability that a random record of class 1 has a higher score than a random record of
    class 0. The result is NaN if a class is missing or an output is not finite.

    Parameters
    ----------
    outputs : Tensor
        Outputs (n, 2) of a model with two classes. A record's score is its second output minus its
        first.
    targets : Tensor
        0 or 1 (n,).
    """
    return _of_scores("roc_auc_score", outputs, targets)


def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the precision-recall curve, as a sum of steps.

    The parameters are as for `roc_auc`, and the result is NaN in the same cases. A model that
    guesses has the fraction of class 1 as its average precision, and 0.5 as its area under the ROC
    curve.
    """
    return _of_scores("average_precision_score", outputs, targets)


def _of_scores(metric: str, outputs: Tensor, targets: Tensor) -> float:
    from sklearn import metrics  # importing it takes half a second, and few methods need it

    if outputs.ndim != 2 or outputs.shape[1] != 2:
        raise InvalidValue(f"outputs of shape {tuple(outputs.shape)}: expected (n, 2), two classes")
    labels = targets.cpu().numpy()
    if not np.isin(labels, (0, 1)).all():
        raise InvalidValue(f"targets {np.unique(labels).tolist()}: expected the classes 0 and 1")
    scores = (outputs[:, 1] - outputs[:, 0]).detach().double().cpu().numpy()
    if len(np.unique(labels)) < 2 or not np.isfinite(scores).all():
        return math.nan
    return float(getattr(metrics, metric)(labels, scores))
