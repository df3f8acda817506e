"""The concordance index equals a plain count of pairs."""

import math

import pytest
import torch

from flower_ext.metrics import concordance_index


def reference(scores, targets):
    right, pairs = 0.0, 0
    for i, (time, event) in enumerate(targets.tolist()):
        for j, (other, happened) in enumerate(targets.tolist()):
            if event and (other > time or (other == time and not happened)):
                pairs += 1
                gap = scores[i].item() - scores[j].item()
                right += 1.0 if gap > 0 else 0.5 if gap == 0 else 0.0
    return right / pairs


def survival(times, events):
    return torch.tensor([times, events], dtype=torch.float32).T


@pytest.mark.parametrize("seed", range(5))
def test_the_index_equals_a_plain_count_with_ties(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 6, (50, 1), generator=generator).float()
    time = torch.randint(0, 12, (50,), generator=generator).float()
    event = (torch.rand(50, generator=generator) < 0.5).float()
    targets = torch.stack([time, event], dim=1)
    assert concordance_index(scores, targets) == pytest.approx(reference(scores, targets))


def test_right_order_is_one_wrong_order_zero_and_no_order_a_half():
    targets = survival([1.0, 2.0, 3.0, 4.0], [1, 1, 0, 1])
    risk = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert concordance_index(risk, targets) == 1.0
    assert concordance_index(-risk, targets) == 0.0
    assert concordance_index(torch.zeros(4), targets) == 0.5
    assert concordance_index(risk.unsqueeze(1).exp(), targets) == 1.0


def test_observation_until_the_event_counts_as_longer_and_events_do_not_compare():
    risk = torch.tensor([2.0, 1.0])
    assert concordance_index(risk, survival([3.0, 3.0], [1, 0])) == 1.0
    assert concordance_index(risk, survival([3.0, 3.0], [0, 1])) == 0.0
    assert math.isnan(concordance_index(risk, survival([3.0, 3.0], [1, 1])))


def test_equal_infinite_scores_are_ties():
    targets = survival([1.0, 2.0, 3.0], [1, 1, 1])
    for infinite in (math.inf, 1e30):
        scores = torch.tensor([infinite, infinite, 0.0])
        assert concordance_index(scores, targets) == pytest.approx(2.5 / 3)
        assert concordance_index(-scores, targets) == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("place", [0, 2])
def test_scores_times_and_events_that_are_nan_give_no_index(place):
    scores, targets = torch.tensor([3.0, 2.0, 1.0]), survival([1.0, 2.0, 3.0], [1, 1, 1])
    for array in (scores, targets[:, 0], targets[:, 1]):
        kept = array[place].clone()
        array[place] = math.nan
        assert math.isnan(concordance_index(scores, targets))
        array[place] = kept
    assert concordance_index(scores, targets) == 1.0


def test_the_index_is_nan_if_no_pair_can_be_compared():
    assert math.isnan(concordance_index(torch.zeros(3), survival([1.0, 2.0, 3.0], [0, 0, 0])))
    assert math.isnan(concordance_index(torch.zeros(0), torch.zeros(0, 2)))
