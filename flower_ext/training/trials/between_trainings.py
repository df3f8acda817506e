"""A trial that one training leaves nothing behind for the next one in the same process.

Every training builds or copies its own model, but all of them share class attributes, global
variables and what hooks enclose. Through these one user's records would change the updates of other
users, or of other clients, which no clipping of each update bounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flower_ext.data import ClientData, Examples, trees
from flower_ext.errors import InvalidValue, tellable
from flower_ext.training.isolation import isolated
from flower_ext.training.local import Job, LocalTraining, train_job
from flower_ext.training.model_factory import in_training, seeded
from flower_ext.training.params import Params, shaken
from flower_ext.training.task import Task
from flower_ext.training.trials.batch_invariance import random_examples, unlike_examples, zeros
from flower_ext.training.trials.snapshots import changed, same_params, state_of


def require_apart(task: Task, examples: Examples) -> None:
    """Refuse a model or a loss by which one training changes another one.

    The trial trains on random examples and on odd ones, so it depends on nobody's data. The process
    remembers its result. An accelerator is tried with zeros and ones as integers, and a processor
    with others too (see `unlike_examples`).

    Raises
    ------
    InvalidValue
        The message names what two models share, and may travel.
    Exception
        Examples of this kind, such as quantised ones, cannot be made at random.
    """
    features = trees.mapped(_one_row, examples.features)
    targets = trees.mapped(_one_row, examples.targets)
    form = trees.form(features), trees.form(targets)
    trial = _Trial(features, targets)
    for device in dict.fromkeys((str(task.torch_device()), "cpu")):
        # The trial runs once in a process: its draws must not move those that follow.
        with seeded(0, devices=device != "cpu"):
            place = _shared(trial, task.model, task.loss, device, form)
        if place is not None:
            raise tellable(
                InvalidValue(
                    f"{place} changes while a model trains, and other models see it: expected no "
                    "change, because one user's records would move the updates of others, which "
                    "no clipping bounds. Keep it in the model itself, where each training has its "
                    "own"
                )
            )


class _Trial:
    """Features and targets whose shapes and types matter; a cache must not compare them."""

    def __init__(self, features: Any, targets: Any) -> None:
        self.features, self.targets = features, targets

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Trial)

    def __hash__(self) -> int:
        return 0


def _positions(of_numpy: Any = None, of_python: Any = None) -> tuple[object, ...]:
    """Return what a draw changes in the global generators, or in earlier states of them."""
    numpy_state = np.random.get_state(legacy=False) if of_numpy is None else of_numpy  # noqa: NPY002
    state = numpy_state["state"]
    drawn = state["pos"] if "pos" in state else repr(state), numpy_state["has_gauss"]
    return (*drawn, random.getstate() if of_python is None else of_python)


def _one_row(leaf: Tensor) -> Tensor:
    return leaf.new_zeros((1, *leaf.shape[1:]))


def _no_data(client: int) -> ClientData:
    raise NotImplementedError


@lru_cache(maxsize=64)
def _shared(
    trial: _Trial, build: Callable[..., Any], loss: Callable[..., Tensor], device: str, form: object
) -> str | None:
    """Return the place that trainings share and change; None if a trial finds none."""
    task = Task(model=build, data=_no_data, loss=loss, device=device)
    generator = torch.Generator().manual_seed(0)
    start = shaken(task.factory.like_initial(0), generator)

    def trained(features: Any, targets: Any) -> Params | None:
        job = Job(
            params=start,
            examples=Examples(features, targets),
            training=LocalTraining(steps=2, batch_size=2),
            generator=torch.Generator().manual_seed(0),
        )
        try:
            with isolated():
                return train_job(task, job)
        except Exception:  # a model or a loss may raise anything, for random examples too
            return None

    # A model that no training has: what changes in it, all models share.
    with seeded(0, devices=device != "cpu"):
        beside = in_training(task.model().to(task.torch_device()))
    usual, other = (
        (random_examples(trial.features, 3, generator), zeros(trial.targets, 3)) for _ in range(2)
    )
    unlike = unlike_examples(trial.features, trial.targets, beside, integers=device == "cpu")
    draws = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        first = trained(*usual)
        if _positions() != _positions(*draws):
            return "the global generator of numpy.random or random (draw from torch.rand instead)"
    finally:
        np.random.set_state(draws[0])  # noqa: NPY002
        random.setstate(draws[1])
    before = state_of(model=beside, loss=loss)
    for examples in (other, *trees.split(unlike, 1)):
        trained(*examples)
        if places := changed(before, state_of(model=beside, loss=loss)):
            return places[0]
    again = trained(*usual)
    return None if same_params(first, again) else "a variable elsewhere"
