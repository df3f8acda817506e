"""How well scores tell a rare class from a common one, whatever the threshold."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from flower_ext.errors import InvalidValue


def roc_auc(outputs: Tensor, targets: Tensor) -> float:
    """Area under the ROC curve: how often a record of class 1 scores above one of class 0.

    NaN where a class is missing, or an output is not finite.

    Parameters
    ----------
    outputs : Tensor
        Of a model with two classes (n, 2); the score of a record is how far the second output is
        above the first.
    targets : Tensor
        0 or 1 (n,).
    """
    return _of_scores("roc_auc_score", outputs, targets)


def average_precision(outputs: Tensor, targets: Tensor) -> float:
    """Area under the precision-recall curve, as a sum of steps; NaN and parameters as `roc_auc`.

    A model that knows nothing has the share of class 1, where ROC-AUC has 0.5.
    """
    return _of_scores("average_precision_score", outputs, targets)


def _of_scores(metric: str, outputs: Tensor, targets: Tensor) -> float:
    from sklearn import metrics  # half a second, which few methods need

    if outputs.ndim != 2 or outputs.shape[1] != 2:
        raise InvalidValue(f"outputs of shape {tuple(outputs.shape)}: expected (n, 2), two classes")
    labels = targets.cpu().numpy()
    scores = (outputs[:, 1] - outputs[:, 0]).detach().double().cpu().numpy()
    if len(np.unique(labels)) < 2 or not np.isfinite(scores).all():
        return math.nan
    return float(getattr(metrics, metric)(labels, scores))
