"""On a GPU: DP-SGD sums what a processor sums, and a record moves no more than its own gradient."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.privacy import SeededNoise
from flower_ext.training import ClippedGradient, DpSgdTraining, train_dp_sgd
from tests.support.jobs import Convolutional, Dense, Words, features, problem
from tests.support.keeping import Keeping, at_a_kink
from tests.support.reference.clipped_gradient import by_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Attending(nn.Module):
    """A transformer's layer over five words, with dropout that is off."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        words = self.embedding(x)
        mixed, _ = self.attention(words, words, words, need_weights=False)
        return self.head(self.norm(words + mixed).mean(dim=1))


MODELS = [Dense, Convolutional, Words, Attending]


def on_gpu(model, loss=cross_entropy):
    return replace(problem(model, loss), device="cuda")


def drawn(model, count):
    generator = torch.Generator().manual_seed(count)
    x = features(Words if model is Attending else model, count, generator)
    return Examples(x, torch.randint(3, (count,), generator=generator))


def moved(params):
    return {name: value.cuda() for name, value in params.items()}


def distance(one, other):
    return math.sqrt(sum(float((one[n] - other[n]).double().square().sum()) for n in one))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("clipping_norm", [0.3, 1e6])
def test_the_sum_of_clipped_gradients_matches_a_loop_on_the_cpu(model, clipping_norm):
    task, data = problem(model), drawn(model, 70)
    params = task.initial_params(1)
    names = [name for name, _ in task.model().named_parameters()]
    gradient = ClippedGradient(on_gpu(model), names, clipping_norm=clipping_norm)
    ours = gradient(moved(params), data.features.cuda(), data.targets.cuda())
    theirs = by_loop(task, params, data, clipping_norm, names)
    for name in names:
        torch.testing.assert_close(ours[name].cpu(), theirs[name], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("joining", [1.0, 300.0])
def test_a_joining_record_moves_the_sum_by_at_most_the_clipping_norm(model, joining):
    data = drawn(model, 65)
    x, y = data.features.cuda(), data.targets.cuda()
    if x.is_floating_point():
        x[0] *= joining
    task = on_gpu(model)
    names = [name for name, _ in task.model().named_parameters()]
    gradient = ClippedGradient(task, names, clipping_norm=0.05)
    params = moved(task.initial_params(0))
    for count in (2, 3, 8, 33, 65):
        every = gradient(params, x[:count], y[:count])
        less = gradient(params, x[1:count], y[1:count])
        assert distance(every, less) <= 0.05 * (1 + 1e-5)


@pytest.mark.parametrize("by_vmap", [False, True])
@pytest.mark.parametrize("beside", [0, 2, 7, 20])
def test_records_at_a_kink_keep_their_side_whoever_joins(by_vmap, beside):
    task = on_gpu(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)))
    params = task.initial_params(0)
    gradient = ClippedGradient(task, list(params), clipping_norm=1.0, batch_size=16)
    if by_vmap:
        gradient.way = "by vmap"
    some = at_a_kink(params, 90)
    params, silent = moved(params), torch.zeros(beside, 8)

    def summed(records):
        targets = torch.cat([torch.zeros(len(records)), torch.full((beside,), -100.0)]).long()
        return gradient(params, torch.cat([records, silent]).cuda(), targets.cuda())

    for three in some.split(3):
        assert distance(summed(three), summed(three[1:])) <= 1 + 1e-5


def test_a_model_that_keeps_something_is_refused():
    gradient = ClippedGradient(on_gpu(Keeping), ["layer.weight"], clipping_norm=0.05)
    x, y = torch.randn(20, 4).cuda(), torch.zeros(20).long().cuda()
    with pytest.raises(ValueError, match=r"model\.kept.*changes"):
        gradient(moved(problem(Keeping).initial_params(0)), x, y)


@pytest.mark.parametrize("model", [Dense, Words])
def test_a_record_with_an_integer_out_of_range_counts_as_zero(model):
    task, data = on_gpu(model), drawn(model, 40)
    names = [name for name, _ in task.model().named_parameters()]
    params = moved(task.initial_params(0))
    gradient = ClippedGradient(task, names, clipping_norm=0.05)
    x, y = data.features.cuda(), data.targets.cuda()
    usual = gradient(params, x[1:], y[1:])
    y[0] = 3
    assert distance(gradient(params, x, y), usual) < 1e-6
    if model is Words:
        y[0], x[0, 2] = 0, 11
        assert distance(gradient(params, x, y), usual) < 1e-6
    assert distance(gradient(params, x[1:], y[1:]), usual) < 1e-6


@pytest.mark.parametrize("model", MODELS)
def test_training_by_dp_sgd_ends_where_a_processor_ends(model):
    data = drawn(model, 60)
    settings = DpSgdTraining(
        steps=5,
        sampling_rate=0.5,
        batch_size=30,
        learning_rate=0.2,
        clipping_norm=0.7,
        noise_multiplier=0.3,
    )
    ends = []
    for task in (problem(model), on_gpu(model)):
        end = train_dp_sgd(
            task,
            task.initial_params(0),
            copy.deepcopy(data),
            settings,
            sampling=np.random.default_rng(0),
            noise=SeededNoise(3, "n"),
        )
        ends.append({name: value.cpu() for name, value in end.items()})
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=2e-3, atol=2e-3)
