"""Find the integers, such as labels and words, that a model and its loss accept.

On a CPU, a label or a word that is out of range raises an error that concerns one client only. On
an accelerator, such an error ends all further computation of the process, so one record would stop
every client. Examples are therefore checked before they reach an accelerator. To find the accepted
integers, this module calls the model and the loss on the CPU, on examples of zeros in which one
tensor consists of the integer to test. No record therefore changes which integers another client
may use.

A task accepts non-negative integers up to some limit, for example the length of a table. It may
also accept a few negative integers, which mark labels or words to leave out. The limits that this
module finds are wrong for two kinds of models: those that compute indices from real numbers, and
those that accept some integer but not all non-negative integers below it.
"""

from bisect import bisect_left
from collections import defaultdict
from functools import lru_cache
from logging import getLogger
from typing import Any

import torch
from torch import Tensor

from flower_ext.data import Examples, trees
from flower_ext.data.trees import Tree
from flower_ext.training.isolation import attempted, seeded
from flower_ext.training.kind import TrainingKind, kind_of
from flower_ext.training.models.calls import call_model
from flower_ext.training.task import Task

log = getLogger("flwr")

_MARKS = 16
"""Most negative integers of a tensor to try one by one; if there are more, all are refused. Some,
such as -100, mark labels that a loss ignores."""


class IndexLimits:
    """The integers that a task accepts, for each tensor of its features and targets."""

    def __init__(self, training_kind: TrainingKind) -> None:
        self.task = training_kind.task
        # Two examples, because some layers refuse a batch of one.
        zeros = trees.zeros((training_kind.features, training_kind.targets), 2)
        self._zeros: tuple[Tree, Tree] = trees.to(zeros, torch.device("cpu"))
        self._highest: dict[str, int] = defaultdict(int)
        self._tried: dict[tuple[str, int], bool] = {}

    def usable(self, features: Tree, targets: Tree) -> Tensor:
        """Return booleans (n,) on the CPU: True for an example if the task accepts its integers."""
        usable = torch.ones(trees.length(features), dtype=torch.bool)
        for name, leaf in trees.named("", (features, targets)):
            if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
                continue
            if not leaf.numel():
                continue
            low, high = (int(end) for end in leaf.aminmax())
            if low >= 0 and high <= self._highest[name]:
                continue
            if refused := self._refused(name, leaf.unique().tolist()):
                has_refused = torch.isin(leaf, leaf.new_tensor(refused)).view(len(leaf), -1)
                usable &= ~has_refused.any(dim=1).cpu()
        return usable

    def _refused(self, name: str, values: list[int]) -> list[int]:
        """Return those of the sorted ``values`` that the task refuses in the tensor ``name``."""
        if not self._takes(name, 0):
            log.warning(
                "labels and other integers are not checked before training, because the model or "
                "the loss raises an error for an example that consists of zeros"
            )
            return []
        refused = [value for value in values if value < 0]
        # A mark such as -100 is a single number. A tensor that may hold two negative integers holds
        # numbers, not indices, so every negative integer is accepted.
        if not refused or (self._takes(name, -1) and self._takes(name, refused[0])):
            refused = []
        elif len(refused) <= _MARKS:
            refused = [value for value in refused if not self._takes(name, value)]
        higher = [value for value in values if value > self._highest[name]]
        taken = len(higher)
        if higher and not self._takes(name, higher[-1]):
            # All numbers up to some limit are accepted, so bisection finds it in few passes.
            taken = bisect_left(higher, True, key=lambda value: not self._takes(name, value))
        if taken:
            self._highest[name] = higher[taken - 1]
        return refused + higher[taken:]

    def _takes(self, name: str, value: int) -> bool:
        """Return True if model and loss run on zeros with only ``value`` in the tensor ``name``."""
        if (name, value) in self._tried:
            return self._tried[name, value]

        def filled(leaf: Tensor) -> Tensor:
            return torch.full_like(leaf, value) if leaf is chosen else leaf.clone()

        chosen = dict(trees.named("", self._zeros))[name]
        features, targets = trees.mapped(filled, self._zeros)

        def loss() -> Any:
            outputs = call_model(self.task.factory().eval(), features)
            return self.task.loss(outputs, targets)

        with torch.no_grad(), seeded(0, torch.device("cpu")):
            takes = not isinstance(attempted(loss), Exception)
        self._tried[name, value] = takes
        return takes


_limits = lru_cache(maxsize=64)(IndexLimits)


def usable_rows(task: Task, features: Tree, targets: Tree) -> Tensor:
    """Return booleans (n,) on the CPU: True for an example if the task accepts its integers."""
    return _limits(kind_of(task, features, targets, {})).usable(features, targets)


def require_usable(task: Task, examples: Examples) -> None:
    """Raise an `IndexError`, as a CPU does, if the task does not accept an example's integers."""
    usable = usable_rows(task, examples.features, examples.targets)
    if not usable.all():
        raise IndexError(
            f"{int((~usable).sum())} of {len(examples)} examples hold integers, such as labels or "
            "words, that the model or the loss does not accept: expected, for example, labels "
            "below the number of classes; correct these examples, or leave them out"
        )


def on_device(task: Task, examples: Examples) -> Examples:
    """Move examples to the task's device. If it is an accelerator, call `require_usable` first."""
    device = task.torch_device()
    if device.type != "cpu" and len(examples):
        require_usable(task, examples)
    return examples.to(device)
