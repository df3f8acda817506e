"""Trials of ways to train several models together, on random jobs, before real data are touched.

A job that trains together with others must end with the same model as alone. `why_models_differ`
allows differences by rounding. Where a guarantee allows none, `why_bits_differ` tests whether the
other jobs change any bit. The callers pass the functions that train.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flower_ext.data import Examples
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.models.factory import in_training
from flower_ext.training.params import Params, shaken
from flower_ext.training.problem import Proximal
from flower_ext.training.task import Task
from flower_ext.training.training_kind import TrainingKind
from flower_ext.training.trials.made_up_examples import ODD, with_odd_rows
from flower_ext.training.trials.snapshots import changed_places, snapshot

TrainTogether = Callable[[Sequence[Job]], Params]
"""Trains jobs, the longest first; returns the stacked parameters, with one row per job."""


def random_job(kind: TrainingKind, count: int) -> Job:
    """Return a short training on ``count`` random examples."""
    random = torch.Generator().manual_seed(count)
    # Images of bytes need all grey values: models divide them by 255.
    most = 256 if kind.features.dtype == torch.uint8 else 2
    features = torch.randint(most, (count, *kind.features.shape[1:]), generator=random)
    features = features.to(kind.features.dtype)
    if features.is_floating_point():
        features.normal_(generator=random)
    targets = torch.randint(2, (count, *kind.targets.shape[1:]), generator=random)
    return Job(
        params=kind.task.factory.like_initial(count),
        examples=Examples(features, targets.to(kind.targets.dtype)),
        training=LocalTraining(steps=2, batch_size=3),
        generator=random,
    )


def why_models_differ(
    kind: TrainingKind, train_together: TrainTogether, train: Callable[[Task, Job], Params]
) -> str | None:
    """Return why a job that trains together with another ends with another model than alone.

    The result is None if the models are equal, up to rounding. ``train_together`` trains two jobs
    together. ``train`` is `local.train`, which trains one job.
    """

    # Numbers of examples differ, so that one of the two jobs is padded.
    def jobs() -> list[Job]:
        return [random_job(kind, count) for count in (3, 2)]

    with torch.random.fork_rng(devices=[]):
        try:
            rows = train_together(jobs())
            models = [train(kind.task, job) for job in jobs()]
        except Exception as error:  # a model or a loss may raise anything for a batch
            return f"training two jobs together raises {error!r}"
    for row, (model, job) in enumerate(zip(models, jobs(), strict=True)):
        for name, p in model.items():
            if not p.numel():
                continue
            moved = (p - job.params[name]).double().abs().max()
            if not moved.isfinite():
                return f"training on random examples makes {name} infinite or NaN"
            ours = rows[name][row] if name in rows else job.params[name]
            if float((ours.to(p) - p).double().abs().max()) > 1e-3 * float(moved) + 1e-6:
                return f"training two jobs together gives another {name} than training alone"
    return None


def why_changed_by_pass(kind: TrainingKind) -> str | None:
    """Return a text that says what a forward pass changes in the model; None if nothing.

    If the pass raises an error, the text names this error.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            model = in_training(kind.model())
            before = snapshot(model=model)
            model(random_job(kind, 3).examples.features)
        except Exception as error:  # a model may raise anything for a batch
            return f"a forward pass raises {error!r}"
    places = changed_places(before, snapshot(model=model))
    return f"a forward pass changes {places[0]}" if places else None


def why_bits_differ(
    kind: TrainingKind,
    train_together: TrainTogether,
    training: LocalTraining,
    *,
    terms: bool,
    count: int = 17,
) -> str | None:
    """Return why a bit of a job's model depends on the jobs that train together with it.

    The trial trains ``count`` random jobs together, and then several selections of these jobs. Each
    job must always end with the same model. The result depends on nobody's data. A reason that the
    trial returns is certain. If the trial finds none, it returns None, which is only evidence, for
    this processor.
    """
    half = count // 2
    selections = (
        range(half, count),
        range(0, count, 2),
        range(3, half + 1),
        range(1, half + 1),
        range(count - 5, count - 1),
        [0],
        [count - 6],
    )

    def job(number: int, value: float | None) -> Job:
        """Return a job of 1 or 2 steps. All its features are ``value``; None means random ones."""
        made = random_job(kind, 1 + number * (2 * training.batch_size - 1) // (count - 1))
        features, targets = made.examples.features, made.examples.targets
        if value is not None:
            features = with_odd_rows(features, slice(None), value)
        return replace(
            made,
            params=shaken(made.params, made.generator),
            examples=Examples(features, targets),
            training=training,
            terms=[Proximal(weight=0.1, anchor=made.params)] * terms,
        )

    def models(
        numbers: Sequence[int], values: Sequence[float | None] = (None,)
    ) -> dict[int, Params]:
        """Train the jobs with these numbers together; return the models by the jobs' numbers.

        Job k gets ``values[k % len(values)]`` as its features; None means random features.
        """
        order = sorted(numbers, reverse=True)  # the longest job first
        rows = train_together([job(number, values[number % len(values)]) for number in order])
        return {k: {n: w[row] for n, w in rows.items()} for row, k in enumerate(order)}

    expected = models(range(count))
    # All features of every second job have one unusual value; only the other jobs are compared.
    among_odd = models(range(count), [value for odd in ODD for value in (None, odd)])
    beside_odd = {number: among_odd[number] for number in range(0, count, 2)}
    for selection in (beside_odd, *map(models, selections)):
        for number, model in selection.items():
            for name, weight in model.items():
                if not torch.equal(weight, expected[number][name]):
                    beside = "have unusual features" if selection is beside_odd else "are others"
                    return f"bits of {name} change if the other jobs that train together {beside}"
    return None
