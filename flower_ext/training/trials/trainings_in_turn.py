"""A trial that tests whether a training changes later trainings in the same process.

A model may store anything in itself, because every training builds or copies its own model. But
trainings share class attributes, global variables and the variables that hooks enclose. Through
these, one user's records could change the updates of other users, or of other clients. Clipping
each update does not bound such a change.

The trial compares `snapshots`, and names the variable in which they differ. Snapshots do not reach
every variable, so the trial also repeats a training after trainings on other examples. Both results
must be equal.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.training.isolation import attempted
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.models.factory import in_training
from flower_ext.training.params import Params, shaken
from flower_ext.training.rounding import deterministic_kernels
from flower_ext.training.seeding import seeded
from flower_ext.training.task import Task
from flower_ext.training.training_kind import TrainingKind, kind_of
from flower_ext.training.trials.made_up_examples import random_examples, unlike_examples
from flower_ext.training.trials.snapshots import changed_places, same_params, snapshot

Train = Callable[[Task, Job], Params]
_KEEPS = (
    "{place} changes while a model trains, and other models see it: expected no change, because "
    "one user's records would move the updates of other users, and clipping does not bound that. "
    "Keep it in the model itself, because each training has its own model"
)
_GENERATORS = "the global generator of numpy.random or random (draw from torch.rand instead)"


def why_state_is_shared(task: Task, examples: Examples, train: Train) -> str | None:
    """Return why a training changes later trainings of the process; None if a trial finds nothing.

    Only the shapes and types of the examples matter. The result depends on no data, so it may reach
    the server. The process remembers it.

    Parameters
    ----------
    train : Callable[[Task, Job], Params]
        `local.train`, which trains one job.

    Raises
    ------
    Exception
        Examples of this kind, such as quantised ones, cannot be made at random.
    """
    kind = kind_of(task, examples.features, examples.targets, {})
    on_cpu = kind if kind.device.type == "cpu" else replace(kind, device=torch.device("cpu"))
    for one in dict.fromkeys((kind, on_cpu)):
        if (place := _shared_place(one, train)) is not None:
            return _KEEPS.format(place=place)
    return None


@lru_cache(maxsize=64)
def _shared_place(kind: TrainingKind, train: Train) -> str | None:
    """Return a variable that a training changes and other trainings see.

    The result is None if a trial finds no such variable.
    """
    # Seed the generators, because only the first training of a process runs the trial, and the
    # trial's draws must not change later draws. Use deterministic kernels, because other kernels of
    # accelerators may round differently each time, most of all in half precision.
    with (
        seeded(0, devices=kind.device.type != "cpu"),
        deterministic_kernels(kind.device, strict=False),
    ):
        return _place_by_trial(kind, train)


def _place_by_trial(kind: TrainingKind, train: Train) -> str | None:
    task, generator = kind.task, torch.Generator().manual_seed(0)
    start = shaken(task.factory.like_initial(0), generator)
    # No training uses this model, so whatever changes in it is shared by all models.
    bystander = in_training(task.factory.on(task.torch_device()))
    usual, other = (
        (random_examples(kind.features, 3, generator), trees.zeros(kind.targets, 3))
        for _ in range(2)
    )
    on_cpu = kind.device.type == "cpu"
    unlike = unlike_examples(kind.features, kind.targets, bystander, integers=on_cpu)
    positions = _positions()
    states = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        first = _trained(train, task, start, *usual)
        if _positions() != positions:
            return _GENERATORS
    finally:
        np.random.set_state(states[0])  # noqa: NPY002
        random.setstate(states[1])
    before = snapshot(model=bystander, loss=task.loss)
    for x, y in (other, *trees.split(unlike, 1)):
        _trained(train, task, start, x, y)
        after = snapshot(model=bystander, loss=task.loss)
        if places := changed_places(before, after):
            return places[0]
    again = _trained(train, task, start, *usual)
    return None if same_params(first, again) else "a variable elsewhere"


def _trained(
    train: Train, task: Task, start: Params, features: Tree, targets: Tree
) -> Params | None:
    """Return the model after a short training; None if the training raises an error."""
    job = Job(
        params=start,
        examples=Examples(features, targets),
        training=LocalTraining(steps=2, batch_size=2),
        generator=torch.Generator().manual_seed(0),
    )
    model = attempted(train, task, job)
    return None if isinstance(model, Exception) else model


def _positions() -> bytes:
    """Return the states of the global random generators of NumPy and Python.

    They are pickled, because bytes are easy to compare.
    """
    return pickle.dumps((np.random.get_state(legacy=False), random.getstate()))  # noqa: NPY002
