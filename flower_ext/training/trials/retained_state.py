"""Trials that a model and its loss keep nothing of one example that another one could see.

Between examples of DP-SGD nothing but buffers may change, which every example finds as they were
sent. Between trainings a model may keep what it likes in itself, because every training builds or
copies its own model. But trainings share class attributes, global variables and what hooks enclose.
Through these one user's records would change the updates of others, which no clipping bounds.

Both trials use random and odd examples and compare `snapshots`, which name the place. What no
snapshot reaches, results show: they must not depend on the examples that passed before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_ext.data import ClientData, Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.errors import InvalidValue, tellable
from flower_ext.training.isolation import isolated
from flower_ext.training.local import Job, LocalTraining, train_job
from flower_ext.training.model_factory import in_training
from flower_ext.training.params import Params, shaken
from flower_ext.training.seeding import seeded
from flower_ext.training.task import Task
from flower_ext.training.trials.single_examples import gradient_alone, model_of_single_examples
from flower_ext.training.trials.snapshots import Snapshot, changed_places, same_params, snapshot
from flower_ext.training.trials.trial_examples import random_examples, unlike_examples, zeros

_BETWEEN_EXAMPLES = (
    "{place} changes while an example passes the model or its loss: expected no change, because "
    "one record would move the gradients of those that follow, which no clipping bounds. Change it "
    "only when `not self.training`, or compute it anew in each forward pass; for a weight of "
    "torch.nn.utils.spectral_norm, use torch.nn.utils.parametrizations.spectral_norm"
)
_BETWEEN_TRAININGS = (
    "{place} changes while a model trains, and other models see it: expected no change, because "
    "one user's records would move the updates of others, which no clipping bounds. Keep it in the "
    "model itself, where each training has its own"
)
_GENERATORS = "the global generator of numpy.random or random (draw from torch.rand instead)"


def _refusal(text: str, place: str) -> InvalidValue:
    return tellable(InvalidValue(text.format(place=place)))


def refuse_state_between_examples(
    task: Task, names: Sequence[str], model: nn.Module, features: Tree, targets: Tree
) -> None:
    """Refuse a model or a loss that keeps something of an example.

    Unlike examples pass twice, each time through a fresh model: in one order, then in the other. So
    neither the largest example nor the first one hides what the others leave. An accelerator is
    tried with zeros and ones as integers, and a processor with others too (see `unlike_examples`).

    Parameters
    ----------
    names : sequence of str
        The trained parameters.
    model : nn.Module
        A model of the task, whose tables are read.
    features, targets : Tree
        Examples whose shapes and types alone matter.

    Raises
    ------
    InvalidValue
        The message names the place, and may travel.
    """
    for device in dict.fromkeys((task.torch_device(), torch.device("cpu"))):
        unlike = unlike_examples(features, targets, model, integers=device.type == "cpu")
        examples = [*trees.each(trees.to(unlike, device))]
        on_device = replace(task, device=str(device))
        order = range(len(examples))
        forwards = _passed(on_device, names, examples, order)
        backwards = _passed(on_device, names, examples, reversed(order))
        # What a first pass prepares, as a table of positions, must not depend on the example.
        for place in changed_places(forwards.untouched, forwards.prepared):
            if forwards.prepared.get(place) != backwards.prepared.get(place):
                raise _refusal(_BETWEEN_EXAMPLES, place)
        for number, gradient in forwards.gradients.items():
            if not same_params(gradient, backwards.gradients[number]):
                raise _refusal(_BETWEEN_EXAMPLES, "something outside its attributes")


@dataclass
class _Passed:
    """A model's state before all examples and after the first, and every example's gradient."""

    untouched: Snapshot
    prepared: Snapshot
    gradients: dict[int, Params | None] = field(default_factory=dict)


def _passed(
    task: Task, names: Sequence[str], examples: Sequence[tuple[Tree, Tree]], order: Iterable[int]
) -> _Passed:
    """Pass examples through a fresh model; refuse one that changes after the first of them."""
    devices = task.torch_device().type != "cpu"
    with seeded(0, devices=devices):
        model = model_of_single_examples(task, names)
    before = snapshot(model=model, loss=task.loss)
    passed, is_prepared = _Passed(before, before), False
    for number in order:
        point = {n: p for n, p in model.state_dict().items() if n in task.shapes}
        # Model and loss may write into the example.
        x, y = trees.mapped(Tensor.clone, examples[number])
        gradient = None
        try:
            with seeded(0, devices=devices), isolated():
                gradient = gradient_alone(model, point, names, task.loss, x, y)
        except Exception:  # a model or a loss may raise anything, for random examples too
            pass
        passed.gradients[number] = gradient
        after = snapshot(model=model, loss=task.loss)
        if not is_prepared:  # an example that raises may do so before anything is prepared
            passed.prepared, is_prepared = after, gradient is not None
        elif places := changed_places(passed.prepared, after):
            raise _refusal(_BETWEEN_EXAMPLES, places[0])
    return passed


def refuse_state_between_trainings(task: Task, examples: Examples) -> None:
    """Refuse a model or a loss by which one training changes another one in the same process.

    The shapes and types of the examples alone matter. The process remembers the result.

    Raises
    ------
    InvalidValue
        The message names what two models share, and may travel.
    Exception
        Examples of this kind, such as quantised ones, cannot be made at random.
    """
    features, targets = zeros(examples.features, 1), zeros(examples.targets, 1)
    form = trees.form(features), trees.form(targets)
    for device in dict.fromkeys((str(task.torch_device()), "cpu")):
        # The trial runs once in a process: its draws must not move those that follow.
        with seeded(0, devices=device != "cpu"):
            place = _shared_place(_Kind(task.model, task.loss, device, form, features, targets))
        if place is not None:
            raise _refusal(_BETWEEN_TRAININGS, place)


@dataclass(frozen=True)
class _Kind:
    """The trainings that one trial speaks for; of their examples only the form matters."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    device: str
    form: Hashable
    features: Tree = field(compare=False)
    targets: Tree = field(compare=False)


@lru_cache(maxsize=64)
def _shared_place(kind: _Kind) -> str | None:
    """Return the place that trainings share and change; None if a trial finds none."""
    task = Task(model=kind.model, data=_no_data, loss=kind.loss, device=kind.device)
    generator = torch.Generator().manual_seed(0)
    start = shaken(task.factory.like_initial(0), generator)
    # A model that no training has: what changes in it, all models share.
    bystander = in_training(task.model().to(task.torch_device()))
    usual, other = (
        (random_examples(kind.features, 3, generator), zeros(kind.targets, 3)) for _ in range(2)
    )
    on_cpu = kind.device == "cpu"
    unlike = unlike_examples(kind.features, kind.targets, bystander, integers=on_cpu)
    draws = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        first = _trained(task, start, *usual)
        if _positions() != _positions(*draws):
            return _GENERATORS
    finally:
        np.random.set_state(draws[0])  # noqa: NPY002
        random.setstate(draws[1])
    before = snapshot(model=bystander, loss=task.loss)
    for x, y in (other, *trees.split(unlike, 1)):
        _trained(task, start, x, y)
        if places := changed_places(before, snapshot(model=bystander, loss=task.loss)):
            return places[0]
    again = _trained(task, start, *usual)
    return None if same_params(first, again) else "a variable elsewhere"


def _trained(task: Task, start: Params, features: Tree, targets: Tree) -> Params | None:
    """Return the model after a short training; None if it raises."""
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


def _positions(of_numpy: Any = None, of_python: Any = None) -> tuple[object, ...]:
    """Return what a draw changes in the global generators, or in earlier states of them."""
    numpy_state = np.random.get_state(legacy=False) if of_numpy is None else of_numpy  # noqa: NPY002
    state = numpy_state["state"]
    drawn = state["pos"] if "pos" in state else repr(state), numpy_state["has_gauss"]
    return (*drawn, random.getstate() if of_python is None else of_python)


def _no_data(client: int) -> ClientData:
    raise NotImplementedError
