"""Cox's loss and the concordance index equal plain loops, the loss also with padding."""

import math

import pytest
import torch
from torch.func import grad, vmap

from tests.support.apps import ULDP_FL

cox_loss = ULDP_FL.module("survival").cox_loss
concordance_index = ULDP_FL.module("survival").concordance_index


def patients(count=40, seed=0, ties=True):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    time = torch.rand(count, generator=generator, dtype=torch.float64) * 10
    event = torch.rand(count, generator=generator) < 0.4
    return scores, torch.stack([time.round() if ties else time, event.double()], dim=1)


def reference(scores, targets):
    """Return Breslow's partial likelihood by loops."""
    losses = []
    for i, (time, event) in enumerate(targets.tolist()):
        if event:
            at_risk = [j for j in range(len(scores)) if targets[j, 0] >= time]
            total = sum(math.exp(scores[j].item()) for j in at_risk)
            losses.append(math.log(total) - scores[i].item())
    return sum(losses) / len(losses) if losses else 0.0


@pytest.mark.parametrize("ties", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_loss_is_that_of_a_plain_loop(seed, ties):
    scores, targets = patients(seed=seed, ties=ties)
    assert float(cox_loss(scores, targets)) == pytest.approx(reference(scores, targets))
    assert float(cox_loss(scores[:, 0], targets)) == float(cox_loss(scores, targets))


def test_without_events_loss_and_gradient_are_zero():
    scores, targets = patients()
    targets[:, 1] = 0
    assert cox_loss(scores, targets) == 0
    assert torch.equal(grad(cox_loss)(scores, targets), torch.zeros_like(scores))
    alone = torch.tensor([[3.0]]), torch.tensor([[5.0, 1.0]])
    assert cox_loss(*alone) == 0
    assert torch.equal(grad(cox_loss)(*alone), torch.zeros(1, 1))


def test_adding_a_number_to_all_scores_changes_nothing_however_large():
    scores, targets = patients()
    for shift in (3.0, 1e4, -1e4):
        torch.testing.assert_close(cox_loss(scores + shift, targets), cox_loss(scores, targets))
    assert cox_loss(1e4 * scores, targets).isfinite()
    assert grad(cox_loss)(1e4 * scores, targets).isfinite().all()


def test_padding_does_not_change_loss_and_gradient():
    scores, targets = patients()
    padded = torch.cat([scores, torch.full((7, 1), 50.0, dtype=torch.float64)])
    nonsense = torch.cat([targets, torch.tensor([[3.0, 1.0]] * 7, dtype=torch.float64)])
    present = torch.arange(47) < 40
    torch.testing.assert_close(cox_loss(padded, nonsense, present), cox_loss(scores, targets))
    slope = grad(cox_loss)(padded, nonsense, present)
    torch.testing.assert_close(slope[:40], grad(cox_loss)(scores, targets))
    assert torch.equal(slope[40:], torch.zeros(7, 1, dtype=torch.float64))
    nobody = torch.zeros(47, dtype=torch.bool)
    assert torch.equal(grad(cox_loss)(padded, nonsense, nobody), torch.zeros_like(padded))


def test_many_losses_at_once_are_the_losses_one_by_one():
    many = [patients(20, seed) for seed in range(5)]
    scores = torch.stack([s for s, _ in many])
    targets = torch.stack([t for _, t in many])
    targets[2, :, 1] = 0
    present = torch.arange(20).unsqueeze(0) < torch.tensor([20, 3, 15, 1, 0]).unsqueeze(1)
    together = vmap(cox_loss)(scores, targets, present)
    slopes = vmap(grad(cox_loss))(scores, targets, present)
    for row in range(5):
        alone = scores[row], targets[row], present[row]
        torch.testing.assert_close(together[row], cox_loss(*alone))
        torch.testing.assert_close(slopes[row], grad(cox_loss)(*alone))
    assert torch.autograd.gradcheck(
        lambda s: cox_loss(s, many[0][1]), many[0][0].clone().requires_grad_()
    )


def test_following_the_gradient_raises_the_risk_of_early_deaths():
    time = torch.arange(1.0, 31.0)
    targets = torch.stack([time, torch.ones(30)], dim=1)
    features, weight = -time.unsqueeze(1) / 10, torch.zeros(1, 1)
    before = cox_loss(features @ weight, targets)
    for _ in range(20):
        weight -= 0.1 * grad(lambda w: cox_loss(features @ w, targets))(weight)
    assert weight.item() > 0
    assert cox_loss(features @ weight, targets) < before


def index_by_count(scores, targets):
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
    assert concordance_index(scores, targets) == pytest.approx(index_by_count(scores, targets))


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
