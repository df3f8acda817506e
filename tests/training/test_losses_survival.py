"""Cox's loss equals a plain loop, also in batches and with padding."""

import math

import pytest
import torch
from torch.func import grad, vmap

from flower_ext.training import cox_loss


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
