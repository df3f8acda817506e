"""Clipped steps whose examples pass in parts give the steps of the whole batch."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from flower_ext.privacy import SeededNoise
from flower_ext.training import (
    Job,
    LocalTraining,
    Proximal,
    StepNoise,
    train,
)
from tests.support import worlds


def clipped_job(**changes):
    facts = {
        "params": worlds.task().initial_params(0),
        "examples": worlds.client_data(1).train,
        "training": LocalTraining(epochs=2, batch_size=8, learning_rate=0.3),
        "generator": torch.Generator().manual_seed(3),
        "noise": StepNoise(clipping_norm=0.4, stddev=0.01, source=SeededNoise(5)),
    }
    return Job(**{**facts, **changes})


def test_clipped_steps_with_terms_equal_the_plain_loop():
    anchor = worlds.task().initial_params(9)
    job = clipped_job(terms=[Proximal(weight=0.7, anchor=anchor)])
    ours = train(worlds.task(), job)
    model, noise = worlds.Net(), SeededNoise(5)
    data, order = worlds.client_data(1).train, torch.Generator().manual_seed(3)
    weights = worlds.task().initial_params(0)
    for _ in range(2):
        rows = torch.randperm(len(data), generator=order)
        for batch in rows.split(8):
            summed = {name: torch.zeros_like(w) for name, w in weights.items()}
            for row in batch:
                model.load_state_dict(weights)
                loss = cross_entropy(model(data.features[[row]]), data.targets[[row]])
                parts = torch.autograd.grad(loss, list(model.parameters()))
                norm = math.sqrt(sum(float((part**2).sum()) for part in parts))
                for name, part in zip(weights, parts, strict=True):
                    summed[name] += part * min(1.0, 0.4 / norm)
            # The last batch of a pass is smaller; it is divided by 8 as all others.
            noised = noise.add_gaussian(summed, 0.01 * 8 / 0.3)
            weights = {
                n: w - 0.3 * (noised[n] / 8 + 0.7 * (w - anchor[n])) for n, w in weights.items()
            }
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("setting", [{"momentum": 0.5}, {"sam_radius": 0.1}, {"tolerance": 0.1}])
def test_clipped_steps_refuse_momentum_sam_and_tolerance(setting):
    training = LocalTraining(epochs=1, **setting)
    with pytest.raises(ValueError, match="leave it out, because each step is clipped"):
        train(worlds.task(), clipped_job(training=training))


@pytest.mark.parametrize(
    ("change", "message"), [({"clipping_norm": 0.0}, "clipping_norm"), ({"stddev": -1.0}, "stddev")]
)
def test_step_noise_without_bounds_is_refused_by_name(change, message):
    facts = {"clipping_norm": 1.0, "stddev": 0.1, "source": SeededNoise(1)}
    with pytest.raises(ValueError, match=f"{message}="):
        StepNoise(**{**facts, **change})
