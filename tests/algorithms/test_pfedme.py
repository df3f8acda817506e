"""pFedMe's training of a client equals the plainest loop, and repeats with dropout."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from flower_ext.algorithms.pfedme import PFedMe, local_update
from flower_ext.data import ClientData, Examples
from flower_ext.federation import ClientWork
from flower_ext.training import Linear, LocalTraining, Task
from flower_ext.training.side_by_side import side_by_side
from tests.support.grids import grid
from tests.support.jobs import batches


class Centred(nn.Module):
    """A model that subtracts the mean of its batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x - x.mean(dim=0))


class RunningMean(Centred):
    """A model with a counter in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        with torch.no_grad():
            self.centre.mul_(0.9).add_(x.mean(dim=0), alpha=0.1)
        return self.head(x - self.centre)


def client_work(task, client, method, *, size, dtype=torch.float32, terms=()):
    """Return the work of a client with random data, drawn anew but equal in every call."""
    generator = torch.Generator().manual_seed(client)
    examples = Examples(
        torch.randn(size, 4, generator=generator, dtype=dtype),
        torch.randint(3, (size,), generator=generator),
    )
    return ClientWork(
        method=method.client,
        task=task,
        data=ClientData(train=examples, test=examples),
        received=task.initial_params(0),
        training=method.training,
        settings={"attraction": method.attraction},
        generator=generator,
        terms=terms,
    )


def trained(works):
    """Return each client's (w_i, θ_i), all trained side by side."""
    results = side_by_side(map(local_update, works))
    return [(result.model, result.memory) for result in results]


def plain(work, method):
    """Return (w_i, θ_i) by Algorithm 1, for one client."""
    model = work.task.model().train()
    w, theta = ({n: p.clone() for n, p in work.received.items()} for _ in range(2))
    learnt = [name for name, _ in model.named_parameters()]
    for x, y in batches(work.data.train, method.local, work.generator):
        for _ in range(method.personal_training.steps):
            point = {n: theta[n].clone().requires_grad_() for n in learnt}
            value = work.task.loss(functional_call(model, {**theta, **point}, (x,)), y)
            value = value + sum(term(point) for term in work.terms)
            value = value + method.attraction / 2 * sum(
                (point[n] - w[n]).square().sum() for n in learnt
            )
            slopes = torch.autograd.grad(value, list(point.values()))
            for name, slope in zip(learnt, slopes, strict=True):
                theta[name] -= method.personal_training.learning_rate * slope
        for name in learnt:
            w[name] -= method.local.learning_rate * method.attraction * (w[name] - theta[name])
    return {name: w[name] for name in learnt}, theta


@pytest.mark.parametrize("model", [Centred, RunningMean])
def test_training_equals_the_plainest_loop(model):
    task = Task(model=model, data=lambda client: None, loss=cross_entropy, device="cpu")
    method = PFedMe(
        attraction=2.0,
        local=LocalTraining(epochs=2, batch_size=4, learning_rate=0.05),
        personal_training=LocalTraining(steps=3, learning_rate=0.1),
    )

    def works():
        direction = {n: 0.1 * torch.ones_like(p) for n, p in task.initial_params(0).items()}
        for client, size in enumerate([9, 7, 5, 10]):
            yield client_work(task, client, method, size=size, terms=[Linear(direction=direction)])

    for models, work in zip(trained(works()), works(), strict=True):
        for result, expected in zip(models, plain(work, method), strict=True):
            for name, p in expected.items():
                torch.testing.assert_close(result[name], p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", grid([1, 6, 40], lambda count: count < 40))
def test_a_model_of_double_precision_keeps_its_precision(count):
    def model():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    task = Task(model=model, data=lambda client: None, loss=cross_entropy, device="cpu")
    method = PFedMe(
        attraction=2.1,
        local=LocalTraining(epochs=2, batch_size=4, learning_rate=0.03),
        personal_training=LocalTraining(steps=3, learning_rate=0.1),
    )

    def works():
        for client in range(count):
            size = 8 + client % 5
            yield client_work(task, client, method, size=size, dtype=torch.float64)

    for models, work in zip(trained(works()), works(), strict=True):
        for result, expected in zip(models, plain(work, method), strict=True):
            for name, p in expected.items():
                torch.testing.assert_close(result[name], p, rtol=1e-12, atol=1e-13)


def test_trainings_of_different_clients_share_a_batch():
    task = Task(model=Centred, data=lambda client: None, loss=cross_entropy, device="cpu")
    method = PFedMe(local=LocalTraining(batch_size=4))
    first, second = (
        next(local_update(client_work(task, client, method, size=5 + client))).group
        for client in range(2)
    )
    assert first == second


def test_a_model_with_dropout_trains():
    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 3))

    task = Task(model=model, data=lambda client: None, loss=cross_entropy, device="cpu")
    method = PFedMe(
        attraction=2.0,
        local=LocalTraining(epochs=2, batch_size=4, learning_rate=0.05),
        personal_training=LocalTraining(steps=3, learning_rate=0.1),
    )
    ((first, _),), ((second, _),) = (
        trained([client_work(task, 1, method, size=6)]) for _ in range(2)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert any(not torch.equal(p, first[name]) for name, p in task.initial_params(0).items())
