"""Decide which models train in a batch as they do alone: known obstacles, and trials.

`why_not_batched` finds out whether a batch gives a model the same result, up to rounding, and
`trains_alike` whether the form of a plug-in does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from logging import getLogger

import torch
from torch import Tensor, nn

from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.training.batched.descent import Stack, unstacked
from flower_ext.training.batched.form import MEMORY_LIMIT, Form
from flower_ext.training.job import SGD, Job, LocalTraining
from flower_ext.training.local import train
from flower_ext.training.model_calls import refusing_layer
from flower_ext.training.model_factory import in_training
from flower_ext.training.params import Params
from flower_ext.training.problem import Linear, Proximal
from flower_ext.training.task import Task
from flower_ext.training.trials.snapshots import Snapshots, changed_places
from flower_ext.training.trials.trial_examples import TrainingKind, kind_of

log = getLogger("flwr")


def why_not_batched(task: Task, jobs: Sequence[Job]) -> str | None:
    """Return why these jobs must train one by one; None if they may train in a batch."""
    if reason := why_never_batched(jobs):
        return reason
    if reason := _why_not_batchable(_kind(task, jobs[0])):
        _say_once(reason)
    return reason


def why_never_batched(jobs: Sequence[Job]) -> str | None:
    """Return why these jobs must train one by one, whatever their model; None if they need not."""
    for part in ("features", "targets"):
        if not isinstance(getattr(jobs[0].examples, part), Tensor):
            return f"{part} are no single tensor"
    if any(job.noise is not None for job in jobs):
        return "steps are clipped and noised one by one"
    if any(job.training.tolerance for job in jobs):
        return "exact minimisers are found one by one"
    if any(job.training.optimizer != SGD for job in jobs):
        return "another optimiser than SGD"
    if any(type(term) not in (Proximal, Linear) for job in jobs for term in job.terms):
        return "a term other than Proximal and Linear"
    return None


def _kind(task: Task, job: Job) -> TrainingKind:
    return kind_of(task, job.examples.features, job.examples.targets, job.params)


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


@lru_cache(maxsize=64)
def _why_not_batchable(kind: TrainingKind) -> str | None:
    """Return why models of this kind cannot train in a batch, with targets of this shape."""
    for module in in_training(kind.model()).modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            return "batch normalisation changes the model while it is evaluated"
        drops = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if drops and (type(module) is not nn.Dropout or kind.device.type != "cpu"):
            return f"{module} draws other numbers in a batch of models"
    if layer := refusing_layer(kind.model, kind.features):
        return f"{layer} refuses a mini-batch of a single row"
    return _difference_from_train(
        kind, lambda jobs: Stack(kind.task, jobs, lambda name: True).minimise()
    )


def trains_alike(task: Task, job: Job, form: Form) -> bool:
    """Return True if a plug-in's form trains models like that of ``job`` as `train` does.

    A trial decides, because the code of a model may do more than its layers show. A model that
    counts its passes, say, may act on the count long after the trial, so the function returns False
    for every model that changes anything in a pass.
    """
    return _trains_alike(_kind(task, job), form)


@lru_cache(maxsize=64)
def _trains_alike(kind: TrainingKind, form: Form) -> bool:
    def minimise(jobs: Sequence[Job]) -> Params:
        if [*form.groups(jobs, MEMORY_LIMIT)] != [[*range(len(jobs))]]:
            raise InvalidValue("the form does not take the random jobs of a trial")
        model = in_training(kind.model())
        snapshots = Snapshots(model=model)
        before = snapshots.take()
        model(jobs[0].examples.features)
        if places := changed_places(before, snapshots.take()):
            raise InvalidValue(f"a pass changes {places[0]}")
        return form.minimise(jobs, lambda name: True)

    return _difference_from_train(kind, minimise) is None


def _difference_from_train(
    kind: TrainingKind, minimise: Callable[[Sequence[Job]], Params]
) -> str | None:
    """Return how two short trainings by ``minimise`` differ from `train`; None if they agree."""

    # Different sizes, so that one of the two jobs is padded.
    def jobs() -> list[Job]:
        return [random_job(kind, count) for count in (3, 2)]

    with torch.random.fork_rng(devices=[]):
        try:
            both = jobs()
            ours = unstacked(minimise(both), both)
            theirs = [train(kind.task, job) for job in jobs()]
        except Exception as error:  # a model or a loss may raise anything for a batch
            return f"two in a batch end with {error!r}"
    for one, other, job in zip(ours, theirs, jobs(), strict=True):
        for name, p in other.items():
            if not p.numel():
                continue
            moved = (p - job.params[name]).double().abs().max()
            if not moved.isfinite():
                return f"random examples do not show what a batch makes of {name}"
            if float((one[name].to(p) - p).double().abs().max()) > 1e-3 * float(moved) + 1e-6:
                return f"two in a batch do not make the same {name}"
    return None


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("local trainings run one by one: %s", reason)
