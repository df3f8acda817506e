"""ROC-AUC and average precision equal plain counts."""

import math

import pytest
import torch

from flower_ext.metrics import average_precision, roc_auc


def pairs_in_order(scores, targets):
    """Return the share of (class 1, class 0) pairs with class 1 higher; ties count half."""
    gaps = scores[targets == 1].unsqueeze(1) - scores[targets == 0].unsqueeze(0)
    return float(((gaps > 0).double() + 0.5 * (gaps == 0).double()).mean())


def stepwise_precision(scores, targets):
    """Return Σ over thresholds of (gain in recall) × precision, from the highest score down."""
    area, recall = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = targets[scores >= threshold]
        current_recall = float(chosen.sum() / targets.sum())
        area += (current_recall - recall) * float(chosen.double().mean())
        recall = current_recall
    return area


@pytest.mark.parametrize("seed", range(5))
def test_both_metrics_equal_plain_counts_with_ties(seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randint(0, 5, (80, 2), generator=generator).float()
    targets = (torch.rand(80, generator=generator) < 0.2).long()
    scores = outputs[:, 1] - outputs[:, 0]
    assert roc_auc(outputs, targets) == pytest.approx(pairs_in_order(scores, targets))
    assert average_precision(outputs, targets) == pytest.approx(stepwise_precision(scores, targets))


def test_a_perfect_order_is_1_and_the_threshold_does_not_matter():
    targets = torch.tensor([0, 0, 0, 1])
    outputs = torch.tensor([[9.0, 1.0], [8.0, 1.0], [7.0, 1.0], [6.0, 1.0]])  # argmax is always 0
    assert roc_auc(outputs, targets) == average_precision(outputs, targets) == 1.0


def test_constant_scores_give_a_half_and_the_rare_classs_share():
    outputs, targets = torch.zeros(50, 2), torch.tensor([1] * 5 + [0] * 45)
    assert roc_auc(outputs, targets) == 0.5
    assert average_precision(outputs, targets) == pytest.approx(0.1)


@pytest.mark.parametrize("metric", [roc_auc, average_precision])
def test_both_metrics_need_both_classes_and_finite_outputs(metric):
    assert math.isnan(metric(torch.randn(4, 2), torch.zeros(4)))
    assert math.isnan(metric(torch.tensor([[0.0, math.nan], [0.0, 1.0]]), torch.tensor([0, 1])))
    with pytest.raises(ValueError, match=r"outputs of shape \(4, 3\): expected \(n, 2\)"):
        metric(torch.zeros(4, 3), torch.zeros(4))


@pytest.mark.parametrize("metric", [roc_auc, average_precision])
def test_classes_other_than_0_and_1_are_refused(metric):
    with pytest.raises(ValueError, match=r"targets \[1, 2\]: expected the classes 0 and 1"):
        metric(torch.zeros(4, 2), torch.tensor([1, 2, 1, 2]))
