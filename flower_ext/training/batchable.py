"""Which models train in a batch as they do by themselves: known obstacles, and a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from logging import getLogger

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flower_ext.data import ClientData, Examples
from flower_ext.training.descent import Kind, Stack, form_for, kind_of, unstacked
from flower_ext.training.local import Job, LocalTraining, train
from flower_ext.training.objective import Linear, Proximal
from flower_ext.training.survival import cox_loss
from flower_ext.training.task import Task
from flower_ext.training.unfused import faster_alone

log = getLogger("flwr")

_STEADY_LOSSES = (cross_entropy, cox_loss)
"""Measured, on CPUs, to round a model's outputs alike in every batch of models."""


def why_apart(task: Task, jobs: Sequence[Job], *, steady: bool = False) -> str | None:
    """Why these jobs are better trained one by one; None if they are not.

    If ``steady``, also where no model may depend on the others by its rounding.
    """
    if any(job.training.tolerance for job in jobs):
        return "exact minimisers are found one by one"
    if any(type(term) not in (Proximal, Linear) for job in jobs for term in job.terms):
        return "a term other than Proximal and Linear"
    targets = jobs[0].examples.targets
    reason = _why_unlike(kind_of(task, jobs[0]), task.loss, targets.shape[1:], targets.dtype)
    if reason is None and steady:
        if task.loss not in _STEADY_LOSSES:
            reason = "of this loss nobody knows whether it rounds alike in every batch"
        elif not form_for(task, jobs[0]).steady:
            reason = "of this model not all is known to round alike in every batch"
    if reason is not None:
        _say_once(reason)
    return reason


@lru_cache(maxsize=64)
def _why_unlike(
    kind: Kind, loss: Callable[..., Tensor], shape: torch.Size, dtype: torch.dtype
) -> str | None:
    """What keeps models of this kind from training in a batch, with targets of this shape."""
    for module in kind.build().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "batch normalisation changes the model while it is evaluated"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout draws other numbers in a batch of models"
        if faster_alone(module, kind.device):
            return f"on a CPU {module} is faster by itself"
    return _trial(kind, loss, shape, dtype)


def _trial(
    kind: Kind, loss: Callable[..., Tensor], shape: torch.Size, dtype: torch.dtype
) -> str | None:
    """Why two short trainings in a batch are not what `train` makes of them; None if they are."""
    task = Task(model=kind.build, data=_no_data, loss=loss, device=str(kind.device))
    training = LocalTraining(steps=2, batch_size=3)

    def jobs() -> Iterator[Job]:
        for count in (3, 2):
            random = torch.Generator().manual_seed(count)
            features = torch.randint(
                256 if kind.dtype == torch.uint8 else 2, (count, *kind.shape), generator=random
            ).to(kind.dtype)
            if kind.dtype.is_floating_point:
                features.normal_(generator=random)
            yield Job(
                params=task.initial_params(count),
                examples=Examples(
                    features, torch.randint(2, (count, *shape), generator=random).to(dtype)
                ),
                training=training,
                generator=random,
            )

    with torch.random.fork_rng(devices=[]):
        try:
            both = [*jobs()]
            ours = unstacked(Stack(task, both, lambda name: True).minimise(), both)
            theirs = [
                train(task, job.params, job.examples, training, generator=job.generator)
                for job in jobs()
            ]
        except Exception as error:  # whatever a model or a loss makes of a batch
            return f"two in a batch end with {error!r}"
    for one, other, job in zip(ours, theirs, jobs(), strict=True):
        for name, p in other.items():
            moved = (p - job.params[name]).double().abs().max()
            if not moved.isfinite():
                return f"random examples do not show what a batch makes of {name}"
            if float((one[name].to(p) - p).double().abs().max()) > 1e-3 * float(moved) + 1e-6:
                return f"two in a batch do not make the same {name}"
    return None


def _no_data(client: int) -> ClientData:
    raise NotImplementedError


@lru_cache(maxsize=64)
def _say_once(reason: str) -> None:
    log.info("local trainings run one by one: %s", reason)
