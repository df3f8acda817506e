"""Trials that find whether one training of a process changes another.

`why_state_is_shared` tests trainings that follow one another. A model may store anything in itself,
because every training builds or copies its own model. But trainings share class attributes, global
variables and the closures of hooks. Through these, one user's records could change the updates of
other users, and clipping each update does not bound such a change.

`why_models_differ` and `why_bits_differ` test jobs that train together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.training.isolation import deterministic_kernels, seeded
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.kind import TrainingKind, kind_of
from flower_ext.training.models.factory import in_training
from flower_ext.training.params import Params, shaken
from flower_ext.training.problem import Proximal
from flower_ext.training.task import Task
from flower_ext.training.trials.made_up_examples import (
    UNUSUAL_VALUES,
    random_examples,
    unlike_examples,
    with_unusual_rows,
)
from flower_ext.training.trials.snapshots import (
    Observed,
    changed_places,
    find_carried_change,
    snapshot,
)

Train = Callable[[Task, Job], Params]
"""`local.train`, which trains one job."""
TrainTogether = Callable[[Sequence[Job], Callable[[str], bool]], Params]
"""The method `Form.train`, which trains several jobs. The first job must be the longest."""
_KEEPS = (
    "{place} changes while a model trains, and other models see it: expected no change, because "
    "one user's records would move the updates of other users, and clipping does not bound that. "
    "Keep it in the model itself, because each training has its own model"
)


def why_state_is_shared(task: Task, examples: Examples, train: Train) -> str | None:
    """Return why a training changes later trainings of the process; None if a trial finds nothing.

    The trial compares `snapshots`, and names the variable in which they differ. Snapshots do not
    reach every variable, so the trial also repeats a training after trainings on other examples.
    The two trainings must have equal results.

    Only the shapes and types of the examples matter. The result depends on no data, so it may reach
    the server. The process remembers the result. The function raises an error if it cannot make
    random examples of this kind, for example of a quantised type.
    """
    training_kind = kind_of(task, examples.features, examples.targets, {})
    for device in dict.fromkeys((training_kind.device, torch.device("cpu"))):
        if (place := _shared_place(replace(training_kind, device=device), train)) is not None:
            return _KEEPS.format(place=place)
    return None


@lru_cache(maxsize=64)
def _shared_place(training_kind: TrainingKind, train: Train) -> str | None:
    """Return a variable that a training changes and other trainings see; None if there is none."""
    # Seed the generators, because only the first training of a process runs the trial, and the
    # trial's draws must not change later draws. Use deterministic kernels, because other kernels of
    # accelerators may round differently each time, most of all in half precision.
    with seeded(0, training_kind.device), deterministic_kernels(training_kind.device, strict=False):
        task, generator = training_kind.task, torch.Generator().manual_seed(0)
        start = shaken(task.factory.like_initial(0), generator)
        # No training uses this model, so whatever changes in it is shared by all models.
        bystander = in_training(task.factory.on(task.torch_device()))
        features, targets = training_kind.features, training_kind.targets
        usual, other = (
            (random_examples(features, 3, generator), trees.zeros(targets, 3)) for _ in range(2)
        )
        on_cpu = training_kind.device.type == "cpu"
        unlike = unlike_examples(features, targets, bystander, integers=on_cpu)

        def short_training(features: Tree, targets: Tree) -> Params:
            job = Job(
                params=start,
                examples=Examples(features, targets),
                training=LocalTraining(steps=2, batch_size=2),
                generator=torch.Generator().manual_seed(0),
            )
            return train(task, job)

        observed = Observed({"model": bystander, "loss": task.loss}, short_training)
        inputs = [usual, other, *trees.split(unlike, 1)]
        order = (*range(len(inputs)), 0)  # the usual examples train once more at the end
        return find_carried_change(lambda: observed, inputs, [order], training_kind.device)[0]


def random_job(training_kind: TrainingKind, count: int) -> Job:
    """Return a short training on ``count`` random examples."""
    generator = torch.Generator().manual_seed(count)
    # Images of bytes need all grey values: models divide them by 255.
    most = 256 if training_kind.features.dtype == torch.uint8 else 2
    features = torch.randint(most, (count, *training_kind.features.shape[1:]), generator=generator)
    features = features.to(training_kind.features.dtype)
    if features.is_floating_point():
        features.normal_(generator=generator)
    targets = torch.randint(2, (count, *training_kind.targets.shape[1:]), generator=generator)
    return Job(
        params=training_kind.task.factory.like_initial(count),
        examples=Examples(features, targets.to(training_kind.targets.dtype)),
        training=LocalTraining(steps=2, batch_size=3),
        generator=generator,
    )


def why_models_differ(
    training_kind: TrainingKind, train_together: TrainTogether, train: Train
) -> str | None:
    """Return why a job that trains with another job ends with a different model than alone.

    Rounding makes no difference. None means that the trial found no reason.
    """

    # The two jobs have different numbers of examples, so that one of them is padded.
    def jobs() -> list[Job]:
        return [random_job(training_kind, count) for count in (3, 2)]

    with torch.random.fork_rng(devices=[]):
        try:
            rows = train_together(jobs(), lambda name: True)
            models = [train(training_kind.task, job) for job in jobs()]
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
                return f"training two jobs together gives a different {name} than training one"
    return None


def why_changed_by_pass(training_kind: TrainingKind) -> str | None:
    """Return what a forward pass changes in the model, or the error that it raises; else None."""
    with torch.random.fork_rng(devices=[]):
        try:
            model = in_training(training_kind.model())
            before = snapshot(model=model)
            model(random_job(training_kind, 3).examples.features)
        except Exception as error:  # a model may raise anything for a batch
            return f"a forward pass raises {error!r}"
    places = changed_places(before, snapshot(model=model))
    return f"a forward pass changes {places[0]}" if places else None


def why_bits_differ(
    training_kind: TrainingKind,
    train_together: TrainTogether,
    training: LocalTraining,
    *,
    terms: bool,
    count: int,
) -> str | None:
    """Return why a bit of a job's model depends on the jobs that train together with it.

    The trial trains ``count`` random jobs together, and then several selections of these jobs. Each
    job must always end with the same model. A reason is certain. The result None is only evidence,
    for this processor.
    """
    half, most = count // 2, 2 * training.batch_size - 1
    # Smaller selections train in smaller stacks, and put each job at another place of its stack.
    selections = (
        range(half, count),
        range(0, count, 2),
        range(3, half + 1),
        range(1, half + 1),
        range(count - 5, count - 1),
        [0],
        [count - 6],
    )

    def models(
        numbers: Sequence[int], values: Sequence[float | None] = (None,)
    ) -> dict[int, Params]:
        """Train jobs together, job k with features ``values[k % len(values)]``; return models."""
        order = sorted(numbers, reverse=True)  # the longest job first
        # From 1 example up to two mini-batches, so that some jobs end a step before the others.
        made = (random_job(training_kind, 1 + number * most // (count - 1)) for number in order)
        jobs = [
            _with_settings(job, training, values[number % len(values)], terms=terms)
            for number, job in zip(order, made, strict=True)
        ]
        rows = train_together(jobs, lambda name: True)
        return {k: {n: w[row] for n, w in rows.items()} for row, k in enumerate(order)}

    expected = models(range(count))
    # All features of every second job have one unusual value; only the other jobs are compared.
    among_unusual = models(range(count), [v for value in UNUSUAL_VALUES for v in (None, value)])
    beside_unusual = {number: among_unusual[number] for number in range(0, count, 2)}
    for selection in (beside_unusual, *map(models, selections)):
        for number, model in selection.items():
            for name, weight in model.items():
                if not torch.equal(weight, expected[number][name]):
                    beside = (
                        "have unusual features" if selection is beside_unusual else "are others"
                    )
                    return f"bits of {name} change if the other jobs that train together {beside}"
    return None


def _with_settings(job: Job, training: LocalTraining, value: float | None, *, terms: bool) -> Job:
    """Return the job with these settings and other weights; a ``value`` replaces all features."""
    features, targets = job.examples.features, job.examples.targets
    if value is not None:
        features = with_unusual_rows(features, slice(None), value)
    return replace(
        job,
        params=shaken(job.params, job.generator),
        examples=Examples(features, targets),
        training=training,
        terms=[Proximal(weight=0.1, anchor=job.params)] * terms,
    )
