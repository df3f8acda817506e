"""Norms of images train even where their input needs no gradient, on which PyTorch may crash."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.privacy import SecureNoise
from flower_ext.training import Job, LocalTraining, StepNoise, train
from tests.support.jobs import problem, train_one

ONE_STEP = LocalTraining(epochs=1, batch_size=20, learning_rate=0.1)


def norm_first() -> nn.Module:
    return nn.Sequential(
        nn.GroupNorm(3, 3), nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 80, 10)
    )


def norm_later() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 80, 10)
    )


def everything(name: str) -> bool:
    return True


def all_but_the_first(name: str) -> bool:
    return not name.startswith("0.")


CASES = [(norm_first, everything), (norm_later, everything), (norm_later, all_but_the_first)]


def images() -> Examples:
    random = torch.Generator().manual_seed(0)
    return Examples(
        torch.randn(20, 3, 12, 10, generator=random), torch.randint(10, (20,), generator=random)
    )


def one_step(model, params, trained):
    """Return the parameters after one plain step of SGD."""
    data = images()
    leaves = {n: p.clone().requires_grad_(trained(n)) for n, p in params.items()}
    loss = cross_entropy(functional_call(model(), leaves, (data.features,)), data.targets)
    chosen = [n for n in params if trained(n)]
    slopes = torch.autograd.grad(loss, [leaves[n] for n in chosen])
    moved = dict(zip(chosen, slopes, strict=True))
    return {n: p - 0.1 * moved[n] if n in moved else p for n, p in params.items()}


@pytest.mark.parametrize(("model", "trained"), CASES)
def test_the_loop_takes_the_plain_step(model, trained):
    params = problem(model).initial_params(0)
    found = train_one(
        problem(model), params, images(), ONE_STEP, trained=trained, generator=torch.Generator()
    )
    torch.testing.assert_close(found, one_step(model, params, trained))


@pytest.mark.parametrize(("model", "trained"), CASES)
def test_dp_sgd_takes_the_plain_step_where_nothing_is_clipped_or_noised(model, trained):
    params = problem(model).initial_params(0)
    noise = StepNoise(clipping_norm=1e6, stddev=0.0, source=SecureNoise())
    job = Job(
        params=params,
        examples=images(),
        training=ONE_STEP,
        generator=torch.Generator(),
        noise=noise,
    )
    found = train(problem(model), job, trained=trained)
    torch.testing.assert_close(found, one_step(model, params, trained), rtol=1e-4, atol=1e-5)
