"""In a batch of users no bit of one depends on the others."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from flower_ext.data import Examples
from flower_ext.training import Job, LocalTraining
from flower_ext.training.batched import many
from flower_ext.training.batched.constant_shape import SIZES as STACKS
from flower_ext.training.batched.constant_shape import ConstantStack, Shape
from flower_ext.training.batched.many import train_groups
from flower_ext.training.isolation import products_are_reproducible
from tests.support.apps import ULDP_FL
from tests.support.grids import grid
from tests.support.jobs import (
    SGD,
    UNEVEN,
    WAYS,
    Words,
    jobs_of,
    one_by_one,
    perceptron,
    problem,
    same,
)

cox_loss = ULDP_FL.module("survival").cox_loss

SIZES = [33, 9, 20, 3, 1, 12, 40, 8, 9, 16]
UNSTABLE = LocalTraining(epochs=4, batch_size=10, learning_rate=1.0, momentum=0.9)

needs_mkl = pytest.mark.skipif(
    not products_are_reproducible(), reason="without MKL all train one by one"
)


def layered():
    return perceptron(nn.LayerNorm(5), nn.Tanh())


def of(activation):
    return lambda: perceptron(activation(), nn.Dropout(0.3))


def trained(task, jobs, members=None):
    """Return the models of some jobs, by their numbers, and the sizes of their groups."""
    members = range(len(jobs)) if members is None else members
    models, sizes = {}, []
    for group, rows in train_groups(task, [jobs[i] for i in members], batch_invariant=True):
        sizes.append(len(group))
        for row, index in enumerate(group):
            models[members[index]] = {name: p[row].clone() for name, p in rows.items()}
    return models, sizes


def differing(model, jobs, others=()):
    """Return the jobs whose models differ in some bit beside fewer or other jobs."""
    everyone, _ = trained(problem(model), jobs())
    count = len(everyone)
    companies = [[0], [count - 1], range(3, count), range(0, count, 2)]
    different = set()
    for members in companies:
        different |= changed(everyone, trained(problem(model), jobs(), members)[0])
    for odd in others:
        beside = jobs()
        for member, change in odd.items():
            beside[member] = change(beside[member])
        different |= changed(everyone, trained(problem(model), beside)[0]) - {*odd}
    return different


def changed(usual, models):
    """Return the numbers of the models that differ from the usual ones."""
    return {
        number
        for number, model in models.items()
        if not all(torch.equal(p, usual[number][name]) for name, p in model.items())
    }


def scaled(factor):
    """Return the same job with other features."""

    def odd(job):
        return replace(job, examples=Examples(factor * job.examples.features, job.examples.targets))

    return odd


def ignoring(job):
    targets = job.examples.targets.clone()
    targets[0] = -100
    return replace(job, examples=Examples(job.examples.features, targets))


def of_one_example(job):
    features, targets = job.examples.features[:1], job.examples.targets[:1]
    return replace(job, examples=Examples(features, targets))


ODD = [
    {0: scaled(float("nan")), 5: ignoring},
    {0: scaled(float("inf")), 6: of_one_example},
    {0: scaled(1e30)},
]
"""For each case, functions that replace jobs by unusual ones, by the jobs' numbers."""
ACTIVATIONS = (nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.SiLU, nn.ELU, nn.Softplus)


@needs_mkl
@pytest.mark.parametrize(
    "model", grid([layered, *map(of, ACTIVATIONS)], lambda model: model is layered)
)
@pytest.mark.parametrize("way", grid(["momentum", "sam", "proximal"], "sam".__eq__))
def test_no_bit_of_a_model_depends_on_the_other_jobs(model, way):
    training = replace(WAYS[way][0], epochs=2, batch_size=10, learning_rate=1.0)

    def jobs():
        return jobs_of(model, [training], SIZES)

    _, sizes = trained(problem(model), jobs())
    assert sorted(sizes) == [3, 7]
    assert differing(model, jobs, ODD) == set()


TOGETHER = {(Words if way in ("sgd", "all different") else layered, way) for way in WAYS}


@pytest.mark.parametrize("batch_size", [1, 7, 8, 9, 20, 64])
def test_no_number_is_left_over_at_the_end_of_an_array(batch_size):
    training = LocalTraining(batch_size=batch_size)
    for job in jobs_of(layered, [training], range(1, 3 * batch_size)):
        rows = Shape.of(job).rows
        assert all(rows * models % 32 == 0 for models in STACKS)
        assert min(len(job.examples), batch_size) <= rows < batch_size + 8


@needs_mkl
@pytest.mark.parametrize(
    ("model", "way"),
    grid(product([layered, Words], WAYS), lambda case: case in TOGETHER),
)
def test_a_batch_of_users_equals_them_one_by_one(model, way):
    models, sizes = trained(problem(model), jobs_of(model, WAYS[way], UNEVEN * 6))
    assert max(sizes) > 4
    alone = one_by_one(problem(model), jobs_of(model, WAYS[way], UNEVEN * 6))
    same([{**alone[i], **models[i]} for i in range(len(alone))], alone)


@needs_mkl
def test_a_loss_that_compares_examples_never_sees_padding():
    task = problem(lambda: nn.Linear(4, 1, bias=False), cox_loss)

    def jobs():
        for client, size in enumerate(SIZES):
            draw = torch.Generator().manual_seed(client)
            targets = torch.stack([torch.rand(size, generator=draw), torch.ones(size)], dim=1)
            data = Examples(torch.randn(size, 4, generator=draw), targets)
            start = task.initial_params(0)
            yield Job(params=start, examples=data, training=SGD, generator=draw)

    models, sizes = trained(task, [*jobs()])
    assert max(sizes) > 4
    same([models[i] for i in range(len(SIZES))], one_by_one(task, [*jobs()]))


def by_size(stack, models):
    return len(stack.jobs) > 8


def by_place(stack, models):
    return torch.arange(len(stack.jobs)) == 3


def by_data(stack, models):
    return any(bool(job.examples.features.isnan().any()) for job in stack.jobs)


@needs_mkl
@pytest.mark.parametrize(
    ("tried", "fault"),
    grid(
        product([True, False], [by_size, by_place, by_data]),
        lambda case: case[0] or case[1] is by_data,
    ),
)
def test_a_library_that_rounds_by_the_others_is_found_and_not_used(fault, tried, monkeypatch):
    train = ConstantStack.train

    def faulty(self):
        models = train(self)
        upwards = {n: torch.nextafter(w, torch.tensor(torch.inf)) for n, w in models.items()}
        moved = torch.as_tensor(fault(self, models)).expand(len(self.jobs))
        return {n: torch.where(moved.view(-1, *[1] * (w.dim() - 1)), upwards[n], w)
                for n, w in models.items()}  # fmt: skip

    monkeypatch.setattr(ConstantStack, "train", faulty)
    trial = many.stack_rounds_alike.__wrapped__ if tried else lambda *_: True
    monkeypatch.setattr(many, "stack_rounds_alike", trial)

    def jobs():
        return jobs_of(layered, [UNSTABLE], [33, 30, 28, 35, 39, 31, 40, 36, 38, 37])

    assert bool(differing(layered, jobs, [{0: scaled(float("nan"))}])) == (not tried)
    _, sizes = trained(problem(layered), jobs())
    assert sizes == ([1] * 10 if tried else [10])


class Gated(nn.Module):
    """A model that turns a weight of its own into another one."""

    def __init__(self):
        super().__init__()
        self.head, self.gate = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return self.head(x) * torch.sigmoid(self.gate)


def large():
    return nn.Sequential(nn.Linear(4, 20_000), nn.ReLU(), nn.Linear(20_000, 3))


def normed():
    return perceptron(nn.BatchNorm1d(5))


def convolutional():
    return nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Linear(9, 3))


def squared(outputs, targets):
    return (outputs.mean(dim=1) - targets).square().mean()


@pytest.mark.parametrize(
    ("model", "loss"),
    [(model, nn.functional.cross_entropy) for model in (Gated, large, normed, convolutional)]
    + [(layered, squared)],
)
def test_models_that_could_mix_or_gain_nothing_train_one_by_one(model, loss):
    task, jobs = problem(model, loss), jobs_of(model, [SGD], UNEVEN)
    assert max(trained(task, jobs)[1]) == 1


def test_the_number_of_threads_is_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained(problem(layered), jobs_of(layered, [SGD], UNEVEN))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
