"""Scores of a client equal those of a plain evaluation, whatever clients come before."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.training import Task, accuracy, evaluate, scoring
from tests.support.jobs import SGD, UNEVEN, Dense, evaluate_each, jobs_of, problem


def test_evaluation_in_pieces_equals_evaluation_at_once(monkeypatch):
    (job,) = jobs_of(Dense, [SGD], [40])
    whole = evaluate(problem(), job.params, job.examples)
    monkeypatch.setattr(scoring, "_ROWS", 7)
    pieces = evaluate(problem(), job.params, job.examples)
    assert whole == pytest.approx(pieces)
    assert set(whole) == {"loss", "accuracy"}


class UnderZeros(nn.Module):
    """A model that mixes examples, which no output shows while its head is zero."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(x - x.mean(dim=0))


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
        UnderZeros,
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Flatten(0), nn.Unflatten(0, (-1, 3))),
    ],
    ids=["looks at the batch", "looks at it under zeros", "two rows an example"],
)
def test_models_that_mix_examples_of_a_client_mix_no_clients(model):
    def loss(outputs, targets):
        return cross_entropy(outputs, targets.repeat_interleave(len(outputs) // len(targets)))

    task = replace(problem(model, loss), metrics={})
    params = {name: p + 0.1 * torch.randn_like(p) for name, p in task.initial_params(0).items()}
    examples = [job.examples for job in jobs_of(Dense, [SGD], UNEVEN)]
    for ours, expected in zip(
        evaluate_each(task, [params] * len(examples), examples), examples, strict=True
    ):
        assert ours == pytest.approx(evaluate(task, params, expected), abs=1e-6)


@pytest.mark.parametrize("model", [Dense, partial(nn.Linear, 4, 3)], ids=["own class", "layer"])
def test_models_are_scored_on_their_examples_shared_or_separate(model):
    task, jobs = problem(model), jobs_of(model, [SGD], UNEVEN)
    shared = jobs[0].params
    models = [shared, jobs[1].params, shared, shared, *(job.params for job in jobs[4:])]
    examples = [job.examples for job in jobs]
    scores = evaluate_each(task, models, examples)
    for ours, params, data in zip(scores, models, examples, strict=True):
        assert ours == evaluate(task, params, data)


class Remembering(Dense):
    """A model that adds to its outputs what it has seen, even in evaluation."""

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(())

    def forward(self, x):
        self.seen = self.seen + x.square().sum()
        return super().forward(x) * (1 + self.seen)


def test_no_bit_of_a_score_depends_on_the_clients_before():
    task, jobs = problem(Remembering), jobs_of(Dense, [SGD], [8, 8, 8])
    data = [job.examples for job in jobs]
    together = evaluate_each(task, [jobs[0].params] * 3, data)
    assert together == [evaluate(task, jobs[0].params, examples) for examples in data]


class Random(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5, training=True))


def test_scores_of_a_model_that_draws_depend_on_no_other_client():
    task = Task(model=lambda: Random(4, 3), data=lambda client: None, device="cpu")
    examples = Examples(torch.randn(20, 4), torch.arange(20) % 3)
    params = task.initial_params(1)
    alone = evaluate_each(task, [params], [examples])
    assert evaluate_each(task, [params] * 3, [examples] * 3) == alone * 3


def test_accuracy_of_targets_that_are_no_classes_is_refused():
    regression = problem(loss=lambda outputs, targets: ((outputs[:, 0] - targets) ** 2).mean())
    (job,) = jobs_of(Dense, [SGD], [40])
    examples = Examples(job.examples.features, job.examples.targets.float())
    with pytest.raises(ValueError, match=r"expected class numbers\. .*Task\(metrics"):
        accuracy(torch.zeros(40, 3), examples.targets)
    scores = evaluate(regression, job.params, examples)
    assert math.isnan(scores.pop("accuracy"))
    assert scores == evaluate(replace(regression, metrics={}), job.params, examples)


def test_a_task_of_things_that_are_no_functions_is_refused():
    with pytest.raises(TypeError, match="model is a Linear: expected a function"):
        Task(model=nn.Linear(1, 1), data=lambda i: None)
    with pytest.raises(TypeError, match="data is a list: expected a function"):
        Task(model=Dense, data=[])


def undefined(outputs, targets):
    raise ZeroDivisionError("no example of class 2")


@pytest.mark.parametrize("together", [True, False])
def test_a_score_that_raises_costs_that_score_alone_and_is_named_once(together, logged):
    metrics = {"accuracy": accuracy, "of class 2": undefined}
    task = replace(problem(lambda: Dense()), metrics=metrics)  # a new model in the log
    jobs = jobs_of(Dense, [SGD], [12, 12])
    models = [jobs[0].params, jobs[0].params if together else jobs[1].params]
    for scores, model, job in zip(
        evaluate_each(task, models, [job.examples for job in jobs]), models, jobs, strict=True
    ):
        assert math.isnan(scores.pop("of class 2"))
        assert scores == pytest.approx(evaluate(problem(), model, job.examples), abs=1e-6)
    assert [r.getMessage() for r in logged.records] == [
        "the score 'of class 2' failed, so it is left out"
    ]


def test_an_evaluation_of_which_every_score_raises_is_an_error():
    task = replace(problem(loss=undefined), metrics={"of class 2": undefined})
    (job,) = jobs_of(Dense, [SGD], [12])
    (error,) = evaluate_each(task, [job.params], [job.examples])
    assert isinstance(error, ZeroDivisionError)


def test_parameters_that_a_client_lacks_come_from_no_client_before():
    task = Task(model=lambda: nn.Linear(4, 3), data=lambda client: None, device="cpu")
    examples = Examples(torch.randn(20, 4), torch.arange(20) % 3)
    params = task.initial_params(1)
    without_bias = {"weight": params["weight"]}
    first = evaluate(task, without_bias, examples)
    evaluate(task, {**params, "bias": torch.tensor([100.0, 0.0, -100.0])}, examples)
    assert evaluate(task, without_bias, examples) == first
