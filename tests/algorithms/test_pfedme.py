"""pFedMe's training of a client equals the plainest loop, and repeats with dropout."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from flower_ext.algorithms.pfedme import Envelope, minimise_envelope
from flower_ext.data import Examples
from flower_ext.training import Linear, LocalTraining, Task
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


def plain(task, job):
    model = task.model().train()
    w, theta = ({n: p.clone() for n, p in job.params.items()} for _ in range(2))
    learnt = [name for name, _ in model.named_parameters()]
    for x, y in batches(job.examples, job.training, job.generator):
        for _ in range(job.personal.steps):
            point = {n: theta[n].clone().requires_grad_() for n in learnt}
            value = task.loss(functional_call(model, {**theta, **point}, (x,)), y)
            value = value + sum(term(point) for term in job.objective)
            value = value + job.attraction / 2 * sum(
                (point[n] - w[n]).square().sum() for n in learnt
            )
            slopes = torch.autograd.grad(value, list(point.values()))
            for name, slope in zip(learnt, slopes, strict=True):
                theta[name] -= job.personal.learning_rate * slope
        for name in learnt:
            w[name] -= job.training.learning_rate * job.attraction * (w[name] - theta[name])
    return {name: w[name] for name in learnt}, theta


@pytest.mark.parametrize("model", [Centred, RunningMean])
def test_training_equals_the_plainest_loop(model):
    task = Task(model=model, data=lambda client: None, loss=cross_entropy, device="cpu")

    def jobs():
        start = task.initial_params(0)
        for client, size in enumerate([9, 7, 5, 10]):
            generator = torch.Generator().manual_seed(client)
            yield Envelope(
                params=start,
                examples=Examples(
                    torch.randn(size, 4, generator=generator),
                    torch.randint(3, (size,), generator=generator),
                ),
                training=LocalTraining(epochs=2, batch_size=4, learning_rate=0.05),
                generator=generator,
                personal=LocalTraining(steps=3, learning_rate=0.1),
                attraction=2.0,
                terms=[Linear(direction={n: 0.1 * torch.ones_like(p) for n, p in start.items()})],
            )

    found = minimise_envelope(task, [*jobs()], trained=lambda name: True, memory_limit=2**30)
    for (w, theta), job in zip(found, jobs(), strict=True):
        own_w, own_theta = plain(task, job)
        for name in own_w:
            torch.testing.assert_close(w[name], own_w[name], rtol=1e-5, atol=1e-6)
        for name in own_theta:
            torch.testing.assert_close(theta[name], own_theta[name], rtol=1e-5, atol=1e-6)


def test_a_model_of_double_precision_keeps_its_precision():
    def model():
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    task = Task(model=model, data=lambda client: None, loss=cross_entropy, device="cpu")

    def jobs():
        for client in range(6):
            generator = torch.Generator().manual_seed(client)
            yield Envelope(
                params=task.initial_params(0),
                examples=Examples(
                    torch.randn(8, 4, generator=generator, dtype=torch.float64),
                    torch.randint(3, (8,), generator=generator),
                ),
                training=LocalTraining(epochs=2, batch_size=4, learning_rate=0.03),
                generator=generator,
                personal=LocalTraining(steps=3, learning_rate=0.1),
                attraction=2.1,
            )

    trained = minimise_envelope(task, [*jobs()], trained=lambda name: True, memory_limit=2**30)
    for models, job in zip(trained, jobs(), strict=True):
        for model, expected in zip(models, plain(task, job), strict=True):
            for name, p in expected.items():
                torch.testing.assert_close(model[name], p, rtol=1e-12, atol=1e-13)


def test_a_model_with_dropout_trains():
    def model():
        return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.2), nn.Linear(5, 3))

    task = Task(model=model, data=lambda client: None, loss=cross_entropy, device="cpu")

    def trained():
        job = Envelope(
            params=task.initial_params(0),
            examples=Examples(torch.ones(6, 4), torch.arange(6) % 3),
            training=LocalTraining(epochs=2, batch_size=4, learning_rate=0.05),
            generator=torch.Generator().manual_seed(1),
            personal=LocalTraining(steps=3, learning_rate=0.1),
            attraction=2.0,
        )
        ((w, _),) = minimise_envelope(task, [job], trained=lambda n: True, memory_limit=2**30)
        return w

    first, second = trained(), trained()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(p, first[name]) for name, p in task.initial_params(0).items())
