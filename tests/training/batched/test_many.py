"""Many local trainings at once equal the same trainings one by one."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import ClientData, Examples
from flower_ext.privacy import SeededNoise
from flower_ext.training import (
    Job,
    Linear,
    LocalTraining,
    Proximal,
    StepNoise,
    Task,
    evaluate,
    train,
    train_each,
)
from flower_ext.training.batched.many import attempt_groups, train_groups
from flower_ext.training.batched.mapped import MappedModel
from flower_ext.training.batched.stack import jobs_that_fit
from tests.support.apps import ULDP_FL
from tests.support.grids import grid
from tests.support.jobs import (
    ALIKE,
    SGD,
    UNEVEN,
    WAYS,
    Convolutional,
    Dense,
    Words,
    double_convolutional,
    evaluate_each,
    jobs_of,
    one_by_one,
    perceptron,
    problem,
    same,
    train_many,
    train_one,
)

cox_loss = ULDP_FL.module("survival").cox_loss


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_trainings_equals_them_one_by_one(batched, way, sizes):
    ours = train_many(problem(), jobs_of(Dense, WAYS[way], sizes))
    same(ours, one_by_one(problem(), jobs_of(Dense, WAYS[way], sizes)))
    assert sum(batched) == len(sizes)
    start = jobs_of(Dense, WAYS[way], sizes)[1].params
    assert not torch.allclose(ours[1]["head.weight"], start["head.weight"], atol=1e-3)


def pulled(start, client):
    """Return two terms of each kind, different for every client."""
    generator = torch.Generator().manual_seed(client)
    elsewhere = {n: torch.randn(p.shape, generator=generator).to(p) for n, p in start.items()}
    direction = {n: 0.1 * torch.randn(p.shape, generator=generator).to(p) for n, p in start.items()}
    return [Proximal(weight=0.1 * client, anchor=elsewhere), Linear(direction=direction)]


@pytest.mark.parametrize("way", ["sgd", "sam", "proximal", "all different"])
def test_terms_of_every_client_act_on_it_alone(batched, way):
    ours = train_many(problem(), jobs_of(Dense, WAYS[way], UNEVEN, pulled))
    same(ours, one_by_one(problem(), jobs_of(Dense, WAYS[way], UNEVEN, pulled)))
    without = train_many(problem(), jobs_of(Dense, WAYS[way], UNEVEN))
    assert not torch.allclose(ours[2]["head.weight"], without[2]["head.weight"], atol=1e-3)
    assert batched


@pytest.mark.parametrize(
    ("batch_invariant", "model"),
    grid(
        product([False, True], [Dense, perceptron]),
        lambda case: case[0] == (case[1] is Dense),
    ),
)
def test_jobs_with_noise_take_noised_steps_wherever_others_are_batched(
    batched, model, batch_invariant
):
    def jobs(clipping_norm=0.1, stddev=0.01):
        return [
            replace(
                job,
                noise=StepNoise(
                    clipping_norm=clipping_norm, stddev=stddev, source=SeededNoise(client)
                ),
            )
            for client, job in enumerate(jobs_of(model, WAYS["sgd"], ALIKE))
        ]

    ours = [*train_each(problem(model), jobs(), batch_invariant=batch_invariant)]
    for one, alone in zip(ours, [train(problem(model), job) for job in jobs()], strict=True):
        for name, value in alone.items():
            assert torch.equal(one[name], value)
    assert not batched
    quiet = [*train_each(problem(model), jobs(stddev=0.0), batch_invariant=batch_invariant)]
    loose = [*train_each(problem(model), jobs(clipping_norm=1e6), batch_invariant=batch_invariant)]
    for other in (quiet, loose):
        for one, changed in zip(ours, other, strict=True):
            assert not all(torch.equal(one[name], changed[name]) for name in one)


@pytest.mark.parametrize("part", ["head", "extractor"])
def test_each_clients_frozen_part_is_separate_and_stays(batched, part):
    def chosen(name):
        return name.startswith(part)

    jobs = jobs_of(Dense, WAYS["sam"], UNEVEN)
    ours = train_many(problem(), jobs, trained=chosen)
    same(ours, one_by_one(problem(), jobs_of(Dense, WAYS["sam"], UNEVEN), chosen))
    for job, model in zip(jobs, ours, strict=True):
        for name, value in job.params.items():
            assert torch.equal(model[name], value) == (not chosen(name))
    assert batched


@pytest.mark.parametrize("model", [Convolutional, Words])
@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
def test_convolutions_and_embeddings_train_in_batches_too(batched, model, sizes):
    ways = WAYS["sam"]
    same(
        train_many(problem(model), jobs_of(model, ways, sizes)),
        one_by_one(problem(model), jobs_of(model, ways, sizes)),
    )
    assert batched


def label_smoothing(outputs, targets):
    return cross_entropy(outputs, targets, label_smoothing=0.2)


def test_a_custom_loss_is_averaged_over_each_clients_examples(batched):
    task = problem(loss=label_smoothing)
    ours = train_many(task, jobs_of(Dense, [SGD], UNEVEN))
    same(ours, one_by_one(task, jobs_of(Dense, [SGD], UNEVEN)))
    assert batched


def class_weights(outputs, targets):
    return cross_entropy(outputs, targets, weight=torch.tensor([0.1, 1.0, 5.0]))


@pytest.mark.parametrize(
    ("way", "model", "sizes"),
    grid(
        product(["sgd", "all different"], [Dense, Convolutional], [ALIKE, UNEVEN]),
        [("sgd", Convolutional, ALIKE), ("all different", Dense, UNEVEN)].__contains__,
    ),
)
def test_a_batch_loss_that_is_no_mean_stays_within_each_client(batched, model, sizes, way):
    task = problem(model, class_weights)
    ours = train_many(task, jobs_of(model, WAYS[way], sizes))
    same(ours, one_by_one(task, jobs_of(model, WAYS[way], sizes)))
    assert batched


@pytest.mark.parametrize("sizes", [ALIKE, UNEVEN], ids=["alike", "uneven"])
@pytest.mark.parametrize("model", [Dense, Convolutional])
def test_targets_that_cross_entropy_ignores_do_not_count(batched, model, sizes):
    def jobs():
        made = jobs_of(model, [SGD], sizes)
        for job in made:
            job.examples.targets[::3] = -100
        made[1].examples.targets[:] = -100
        return made

    same(train_many(problem(model), jobs()), one_by_one(problem(model), jobs()))
    assert batched


class Tagging(nn.Module):
    """A class for each of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.unsqueeze(-1)).transpose(1, 2)


def test_an_example_may_have_many_targets(batched):
    def jobs():
        for job in jobs_of(Tagging, [SGD], UNEVEN):
            yield replace(job, examples=Examples(job.examples.features, targets_of(job)))

    def targets_of(job):
        return torch.bucketize(job.examples.features, torch.tensor([-0.5, 0.5]))

    same(train_many(problem(Tagging), list(jobs())), one_by_one(problem(Tagging), list(jobs())))
    assert sum(batched) == len(UNEVEN)


def double():
    return perceptron(nn.LayerNorm(5)).double()


def double_stacked():
    return perceptron(nn.ELU()).double()


@pytest.mark.parametrize(
    ("model", "way", "sizes"),
    grid(
        product(
            [double, double_stacked, double_convolutional],
            ["sgd", "all different"],
            [ALIKE, UNEVEN],
        ),
        [
            (double, "sgd", ALIKE),
            (double_stacked, "all different", UNEVEN),
            (double_convolutional, "sgd", UNEVEN),
        ].__contains__,
    ),
)
def test_models_of_double_precision_train_in_double_precision(batched, model, way, sizes):
    def jobs():
        for job in jobs_of(model, WAYS[way], sizes, pulled):
            data = Examples(job.examples.features.double(), job.examples.targets)
            yield replace(job, examples=data)

    ours = train_many(problem(model), list(jobs()))
    alone = one_by_one(problem(model), list(jobs()))
    for one, other in zip(ours, alone, strict=True):
        for name, p in other.items():
            torch.testing.assert_close(one[name], p, rtol=1e-12, atol=1e-12)
    assert batched


def test_chunks_respect_the_memory_limit_and_change_nothing(batched):
    jobs = jobs_of(Dense, [SGD], [16] * 12)
    numbers = sum(p.numel() for p in jobs[0].params.values())
    enough_for_three = 3 * (4 * (8 * numbers + 16 * 4 + 3 * 8 * (5 + 5 + 3 + 3 + 4)))
    assert jobs_that_fit(problem(), jobs[0], enough_for_three) == 3
    ours = train_many(problem(), jobs, memory_limit=enough_for_three)
    assert batched == [3, 3, 3, 3]
    same(ours, one_by_one(problem(), jobs_of(Dense, [SGD], [16] * 12)))
    assert jobs_that_fit(problem(), jobs[0], 1) == 1


def test_a_single_long_training_does_not_hold_up_a_batch(batched, monkeypatch):
    monkeypatch.setattr(MappedModel, "fewest", 5)
    sizes = [8] * 6 + [800]
    ours = train_many(problem(), jobs_of(Dense, [SGD], sizes))
    assert batched == [6]
    same(ours, one_by_one(problem(), jobs_of(Dense, [SGD], sizes)))


class Cubic:
    """A term that batches do not support."""

    def __call__(self, params):
        return sum(p.pow(3).sum() for p in params.values())


@pytest.mark.parametrize(
    "jobs",
    [
        lambda: jobs_of(Dense, [replace(SGD, learning_rate=0.01)], ALIKE, lambda *_: [Cubic()]),
        lambda: jobs_of(Dense, [LocalTraining(tolerance=1e-6, proximal_weight=50.0)], [6] * 5),
    ],
    ids=["a term of one's own", "exact minimisers"],
)
def test_jobs_that_cannot_be_batched_are_trained(batched, jobs):
    same(train_many(problem(), jobs()), one_by_one(problem(), jobs()))
    assert batched == []


def test_no_jobs_give_no_models():
    assert train_many(problem(), []) == []


@pytest.mark.parametrize("sizes", [[4, 0, 4], [0, 4, 0], [0, 0]])
def test_a_client_without_examples_keeps_its_parameters(sizes):
    jobs = jobs_of(Dense, [SGD], sizes)
    models = train_many(problem(), jobs)
    same(models, one_by_one_or_as_it_was(jobs_of(Dense, [SGD], sizes)))
    with pytest.raises(ValueError, match="without examples"):
        next(train_groups(problem(), jobs))


def one_by_one_or_as_it_was(jobs):
    return [one_by_one(problem(), [job])[0] if len(job.examples) else job.params for job in jobs]


def test_trained_has_to_select_something(batched):
    with pytest.raises(ValueError, match="selects no parameter"):
        train_many(problem(), jobs_of(Dense, [SGD], ALIKE), trained=lambda name: False)


def test_models_in_the_given_jobs_stay_unchanged(batched):
    jobs = jobs_of(Dense, [SGD], ALIKE)
    before = [{n: p.clone() for n, p in job.params.items()} for job in jobs]
    train_many(problem(), jobs)
    assert sum(batched) == len(ALIKE)
    for job, kept in zip(jobs, before, strict=True):
        torch.testing.assert_close(job.params, kept, rtol=0, atol=0)


def chained():
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))


@pytest.mark.parametrize(
    "model", grid([chained, Convolutional, Dense], lambda model: model is not Convolutional)
)
@pytest.mark.parametrize(
    "sizes", grid([[20, 20], [9] * 5 + [12], [1, 2, 3, 3, 3, 7, 40]], lambda sizes: len(sizes) == 7)
)
def test_where_asked_for_no_model_depends_on_which_others_train(model, sizes):
    unstable = LocalTraining(epochs=8, batch_size=4, learning_rate=1.0, momentum=0.9)

    def trained(members):
        made = jobs_of(model, [unstable], sizes)
        made[-1].examples.targets[0] = -100
        rows = train_groups(problem(model), [made[i] for i in members], batch_invariant=True)
        return {
            members[index]: {name: p[row].clone() for name, p in part.items()}
            for group, part in rows
            for row, index in enumerate(group)
        }

    everyone = trained(range(len(sizes)))
    for absent in range(len(sizes)):
        rest = trained([index for index in range(len(sizes)) if index != absent])
        for index, one in rest.items():
            torch.testing.assert_close(one, everyone[index], rtol=0, atol=0)


def pooled():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    )


def wide():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 3))


def of(activation):
    """Return a perceptron with this activation."""
    return lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 21), nn.LeakyReLU(), activation(), nn.Linear(21, 3)
    )


class Mapped(nn.Module):
    """A module without a stacked form."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x):
        return self.body(x.abs() + x)


ALONE = [
    *(pooled, wide, Mapped),
    *map(of, (nn.Sigmoid, nn.SiLU, nn.ELU, nn.GELU, nn.Softplus, nn.Tanh)),
]


@pytest.mark.parametrize(
    ("model", "size", "batch_size"),
    grid(
        [(model, *sizes) for model in ALONE for sizes in ((5, 4), (33, 16))],
        {(pooled, 5, 4), (wide, 33, 16), (Mapped, 5, 4), (ALONE[-1], 33, 16)}.__contains__,
    ),
)
def test_a_lone_batch_invariant_model_equals_one_in_a_group(model, size, batch_size):
    """Libraries have different kernels for one model and for a stack of models.

    Some functions also round the last numbers of an array differently.
    """
    task = problem(model)
    unstable = LocalTraining(epochs=6, batch_size=batch_size, learning_rate=0.5, momentum=0.9)

    def trained(clients):
        made = []
        for client in clients:
            draw = torch.Generator().manual_seed(client)
            examples = Examples(
                features=torch.randn(size, 1, 8, 8, generator=draw),
                targets=torch.randint(3, (size,), generator=draw),
            )
            start = task.initial_params(1)
            made.append(Job(params=start, examples=examples, training=unstable, generator=draw))
        models = {}
        for group, rows in train_groups(task, made, batch_invariant=True):
            for row, index in enumerate(group):
                models[clients[index]] = {name: p[row].clone() for name, p in rows.items()}
        return models

    every = trained([0, 1, 2, 3, 4])
    for clients in ([0], [3], [0, 4], [1, 2, 3]):
        for client, model in trained(clients).items():
            torch.testing.assert_close(model, every[client], rtol=0, atol=0)


class OfAnyLength(nn.Module):
    """A model of sequences of any length."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.step(x.float())).mean(dim=1)


def test_clients_whose_examples_differ_in_shape_or_type_are_kept_apart(batched):
    def jobs():
        for client, length in enumerate([5, 7, 5, 6, 7, 5, 5, 7]):
            generator = torch.Generator().manual_seed(client)
            features = torch.randn(10, length, 4, generator=generator)
            targets = torch.randint(3, (10,), generator=generator)
            yield Job(
                params=problem(OfAnyLength).initial_params(client % 2),
                examples=Examples(features.double() if client == 6 else features, targets),
                training=SGD,
                generator=generator,
            )

    task = problem(OfAnyLength)
    models = train_many(task, [*jobs()])
    same(models, one_by_one(task, [*jobs()]))
    assert sorted(batched) == [3, 3]
    examples = [job.examples for job in jobs()]
    for ours, data in zip(evaluate_each(task, models[:1] * 8, examples), examples, strict=True):
        assert ours == pytest.approx(evaluate(task, models[0], data), abs=1e-6)


def test_a_loss_that_compares_examples_is_not_taken_apart():
    assert not problem().compares_examples
    assert not problem(loss=torch.conv1d).compares_examples  # has no signature to look at
    task = Task(
        model=lambda: nn.Linear(4, 1, bias=False),
        data=lambda client: ClientData(None, None),
        loss=cox_loss,
        device="cpu",
    )
    assert task.compares_examples
    training = LocalTraining(epochs=3, batch_size=8, learning_rate=0.1)

    def jobs():
        for client, size in enumerate((3, 8, 5, 11, 2, 6, 9)):
            generator = torch.Generator().manual_seed(client)
            time = torch.rand(size, generator=generator)
            event = (torch.rand(size, generator=generator) < 0.6).float()
            yield Job(
                params=task.initial_params(0),
                examples=Examples(
                    torch.randn(size, 4, generator=generator), torch.stack([time, event], dim=1)
                ),
                training=training,
                generator=generator,
            )

    alone = [
        train_one(task, job.params, job.examples, training, generator=job.generator)
        for job in jobs()
    ]
    for one, other in zip(alone, train_many(task, list(jobs())), strict=True):
        torch.testing.assert_close(one["weight"], other["weight"], atol=1e-5, rtol=0)
    start = task.initial_params(0)["weight"]
    assert any(not torch.allclose(one["weight"], start) for one in alone)


def test_models_come_batch_by_batch_and_are_those_of_all_at_once(batched):
    task, sizes = problem(), [3, 40, 8, 17, 16, 5, 30, 8, 8]
    limit = 2 * 4 * 8 * sum(p.numel() for p in task.initial_params(0).values())
    came = list(train_groups(task, jobs_of(Dense, [SGD], sizes), memory_limit=limit))
    assert len(came) > 2
    models = {
        index: {name: part[row] for name, part in rows.items()}
        for group, rows in came
        for row, index in enumerate(group)
    }
    ours = [models[index] for index in range(len(sizes))]
    same(ours, train_many(task, jobs_of(Dense, [SGD], sizes)))
    assert sum(batched) == len(sizes)


@pytest.mark.parametrize("model", [Dense, perceptron], ids=["Dense", "perceptron"])
def test_jobs_that_restart_because_another_raises_train_on_the_same_mini_batches(model):
    def models(wrong):
        jobs = jobs_of(model, WAYS["momentum"], ALIKE)
        if wrong:
            jobs[2].examples.targets[3] = 99
        results = attempt_groups(partial(train_groups, problem(model), batch_invariant=True), jobs)
        return {
            index: rows if isinstance(rows, Exception) else {n: p[row] for n, p in rows.items()}
            for group, rows in results
            for row, index in enumerate(group)
        }

    ours, theirs = models(True), models(False)
    assert isinstance(ours.pop(2), Exception)
    assert sorted(ours) == [0, 1, 3, 4, 5, 6]
    for index, model_of_job in ours.items():
        torch.testing.assert_close(model_of_job, theirs[index], rtol=0, atol=0)
