"""A trial that passes examples through a model and its loss one at a time, before DP-SGD.

While an example passes through the model, only buffers may change, because they are reset for every
example. The next example would see any other change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from flower_ext.data import trees
from flower_ext.data.trees import Tree
from flower_ext.training.example_gradient import gradient_alone, model_of_single_examples
from flower_ext.training.isolation import attempted, deterministic_kernels, seeded
from flower_ext.training.models.calls import call_with
from flower_ext.training.params import Params, clone, shaken
from flower_ext.training.task import Task
from flower_ext.training.trials.lone_examples import why_nothing_learned
from flower_ext.training.trials.made_up_examples import (
    TRIED,
    random_examples,
    unlike_examples,
)
from flower_ext.training.trials.snapshots import Snapshot, changed_places, same_params, snapshot

_KEEPS = (
    "{place} changes while an example passes the model or its loss: expected no change, because "
    "one record would change the gradients of later records, and clipping does not bound that. "
    "Change it only when `not self.training`, or compute it anew in each forward pass; for a "
    "weight of torch.nn.utils.spectral_norm, use torch.nn.utils.parametrizations.spectral_norm"
)


def why_not_one_by_one(
    task: Task, names: Sequence[str], features: Tree, targets: Tree
) -> str | None:
    """Return why a model or a loss cannot learn from one example at a time; None if it can.

    There are two possible reasons. First, the model or the loss remembers an example; the text then
    names the variable that changes. Second, the model cannot learn from any single example (see
    `why_nothing_learned`). The text may reach the server.

    Random and unusual examples pass one by one through a fresh model, and in reversed order through
    another fresh model. In a single order, an example's change would stay hidden if an earlier
    example had already made the same change. The examples have only the shapes and types of real
    ones. On an accelerator, integer features are zeros and ones; on a CPU the trial uses other
    integers too (see `unlike_examples`).

    Parameters
    ----------
    names : sequence of str
        The trained parameters.
    """
    usual = _usual_examples(features, targets)
    for device in dict.fromkeys((task.torch_device(), torch.device("cpu"))):
        on_device = replace(task, device=str(device))
        model = _random_model(on_device, names)
        unlike = unlike_examples(features, targets, model, integers=device.type == "cpu")
        examples = [*usual, *trees.each(unlike)]
        examples = [trees.to(example, device) for example in examples]
        order = range(len(examples))
        # Some kernels of accelerators round differently each time.
        with deterministic_kernels(device, strict=False):
            forwards = _passed(on_device, names, examples, order)
            backwards = _passed(on_device, names, examples, reversed(order))
        if (place := _remembering_place(forwards, backwards)) is not None:
            return _KEEPS.format(place=place)
        if device == task.torch_device():
            gradients = [forwards.gradients[number] for number in range(len(usual))]
            outputs_of = partial(_outputs_of, model)
            name = type(model).__name__
            reason = why_nothing_learned(name, outputs_of, examples[: len(usual)], gradients)
            if reason:
                return reason
    return None


def _remembering_place(forwards: _Passed, backwards: _Passed) -> str | None:
    """Return the variable in which the model or the loss remembers an example.

    The result is None if there is no such variable.
    """
    if place := forwards.changed or backwards.changed:
        return place
    # The first pass may store something, such as a table of positions. What it stores must not
    # depend on the example.
    for place in changed_places(forwards.untouched, forwards.prepared):
        if forwards.prepared.get(place) != backwards.prepared.get(place):
            return place
    for number, gradient in forwards.gradients.items():
        pair = gradient, backwards.gradients[number]
        if not same_params(*(None if isinstance(g, Exception) else g for g in pair)):
            return "something outside its attributes"
    return None


def _outputs_of(model: nn.Module, x: Tree) -> Tree:
    """Return a model's outputs without changing its buffers."""
    buffers = clone(dict(model.named_buffers()))
    return call_with(model, {**dict(model.named_parameters()), **buffers}, x)


def _usual_examples(features: Tree, targets: Tree) -> list[tuple[Tree, Tree]]:
    """Return examples from which a model should be able to learn.

    Most are random. One consists of zeros and one of ones, because a model of counts might accept
    no others.
    """
    x = random_examples(features, TRIED, torch.Generator().manual_seed(0))
    examples = [*trees.each((x, trees.zeros(targets, TRIED)))]
    # The loss may ignore a class, so try every example with another target as well.
    examples += [(row, trees.mapped(torch.ones_like, target)) for row, target in examples]
    examples += [trees.mapped(fill, examples[0]) for fill in (torch.zeros_like, torch.ones_like)]
    return examples


def _random_model(task: Task, names: Sequence[str]) -> nn.Module:
    """Return a model whose trained weights are random.

    A head that begins at zero would make all outputs equal.
    """
    with seeded(0, devices=task.torch_device().type != "cpu"):
        model = model_of_single_examples(task, names)
    weights = {name: w for name, w in model.named_parameters() if name in names}
    for name, weight in shaken(weights, torch.Generator().manual_seed(0)).items():
        weights[name].copy_(weight)
    return model


@dataclass
class _Passed:
    """A model's state before and after the first example, and each example's gradient or error."""

    untouched: Snapshot
    prepared: Snapshot
    gradients: dict[int, Params | Exception] = field(default_factory=dict)
    changed: str | None = None
    """The variable that an example after the first has changed; None if no such example did.

    After such a change, no further example passes.
    """


def _passed(
    task: Task, names: Sequence[str], examples: Sequence[tuple[Tree, Tree]], order: Iterable[int]
) -> _Passed:
    """Pass examples through a fresh model; stop if an example after the first changes the model."""
    model = _random_model(task, names)
    before = snapshot(model=model, loss=task.loss)
    passed, is_prepared = _Passed(before, before), False
    for number in order:
        point = {n: p for n, p in model.state_dict().items() if n in task.shapes}
        # Model and loss may write into the example.
        x, y = trees.mapped(Tensor.clone, examples[number])
        with seeded(0, devices=task.torch_device().type != "cpu"):
            gradient = attempted(gradient_alone, model, point, names, task.loss, x, y)
        passed.gradients[number] = gradient
        after = snapshot(model=model, loss=task.loss)
        if not is_prepared:  # an example may raise before the model stores anything
            passed.prepared, is_prepared = after, not isinstance(gradient, Exception)
        elif places := changed_places(passed.prepared, after):
            passed.changed = places[0]
            break
    return passed
