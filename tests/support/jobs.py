"""Models and jobs, with the results of training them one by one, for tests of batched training."""

from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import ClientData, Examples, trees
from flower_ext.training import (
    Job,
    LocalTraining,
    Params,
    Task,
    evaluate,
    train,
    train_each,
)
from flower_ext.training.batched import many
from flower_ext.training.isolation import attempted
from flower_ext.training.job import batch_rows
from flower_ext.training.kind import kind_of


class Dense(nn.Module):
    """Two layers, a head, and a buffer that the forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.extractor(x))) * self.scale)


class Convolutional(nn.Module):
    """A convolutional network for images of shape 2×6×6."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Words(nn.Module):
    """A network for sequences of five word numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).mean(dim=1))


def double_convolutional():
    return Convolutional().double()


def features(model, count, generator):
    if model is Words:
        return torch.randint(11, (count, 5), generator=generator)
    shape = (2, 6, 6) if model in (Convolutional, double_convolutional) else (4,)
    return torch.randn(count, *shape, generator=generator)


def problem(model=Dense, loss=cross_entropy):
    return Task(model=model, data=lambda client: ClientData(None, None), loss=loss, device="cpu")


def jobs_of(model, settings, sizes, terms=lambda start, client: []):
    """Return new jobs, each with its own data, start and order of batches."""
    made = []
    for client, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(client)
        start = {n: p + 0.01 * client for n, p in problem(model).initial_params(3).items()}
        data = Examples(
            features=features(model, size, generator),
            targets=torch.randint(3, (size,), generator=generator),
        )
        training = settings[client % len(settings)]
        made.append(
            Job(
                params=start,
                examples=data,
                training=training,
                generator=torch.Generator().manual_seed(100 + client),
                terms=terms(start, client),
            )
        )
    return made


def batches(examples, training, generator, fewest=1):
    """Yield shuffled mini-batches for as many epochs, or steps, as ``training`` asks for."""
    for rows in batch_rows(len(examples), training, generator, fewest=fewest):
        yield trees.rows((examples.features, examples.targets), rows)


def train_one(task, params, examples, training, *, trained=lambda name: True, **options):
    """Train one job of these arguments."""
    job = Job(params=params, examples=examples, training=training, **options)
    return train(task, job, trained=trained)


def one_by_one(task, jobs, trained=lambda name: True):
    return [train(task, job, trained=trained) for job in jobs]


def assert_isolated(task, make_jobs):
    """Assert that batch-invariant jobs train to the same bits whatever trains beside them.

    ``make_jobs`` returns the same six jobs at every call. In one batch, records of job 3 are NaN.
    """

    def trained(members, odd=None):
        chosen = [make_jobs()[member] for member in members]
        for member, job in zip(members, chosen, strict=True):
            if member == odd:
                job.examples.features[:3] = float("nan")
        return dict(zip(members, train_each(task, chosen, batch_invariant=True), strict=True))

    whole, with_odd = trained(range(6)), trained(range(6), odd=3)
    assert not all(p.isfinite().all() for p in with_odd.pop(3).values())
    for others in (trained([3, 0, 4]), trained([1]), with_odd, trained([5, 2, 3])):
        for member, model in others.items():
            torch.testing.assert_close(model, whole[member], rtol=0, atol=0)


def why_apart(task, jobs):
    """Return why jobs cannot train in a stack; None if they can."""
    first = jobs[0].examples
    kind = kind_of(task, first.features, first.targets, jobs[0].params)
    return many.why_never_together(jobs) or many.why_not_stacked(kind)


def evaluate_each(task, models, examples):
    """Return the scores, or the error, of each client."""
    return [attempted(evaluate, task, *pair) for pair in zip(models, examples, strict=True)]


def same(ours, theirs):
    """Assert that two sequences of parameters have equal names, types and nearly equal values."""
    for one, other in zip(ours, theirs, strict=True):
        assert list(one) == list(other)
        for name in other:
            assert one[name].dtype == other[name].dtype
            torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-5)


SGD = LocalTraining(epochs=2, batch_size=8, learning_rate=0.2)
ALIKE, UNEVEN = [16] * 7, [3, 40, 8, 17, 16, 5, 30]
WAYS = {
    "sgd": [SGD],
    "momentum": [replace(SGD, momentum=0.7)],
    "sam": [replace(SGD, sam_radius=0.3, momentum=0.5)],
    "proximal": [replace(SGD, proximal_weight=0.5)],
    "steps": [replace(SGD, steps=5)],
    "stragglers": [SGD, replace(SGD, epochs=1), replace(SGD, epochs=5)],
    "nothing to do": [replace(SGD, epochs=0), SGD],
    "all different": [
        SGD,
        replace(SGD, batch_size=3, learning_rate=0.05),
        replace(SGD, momentum=0.9, epochs=1),
        replace(SGD, sam_radius=0.2, proximal_weight=0.3),
    ],
}


def perceptron(*between):
    return nn.Sequential(nn.Linear(4, 5), *between, nn.Linear(5, 3))


def train_many(task, jobs, **settings) -> list[Params]:
    """Return all models of `train_each`."""
    return [*train_each(task, jobs, **settings)]
