"""The form whose stacks have a constant shape, so that no bit of a model depends on other models.

A form is a way to train several jobs together (see `form`). A stack is a set of models that train
together; each of its arrays holds the numbers of all these models. How a library rounds a number
depends on the shape of the array and on the number's position in it. Three rules therefore fix the
shape and the positions in advance. The other jobs of a stack can then change only two things: the
size of the stack, and the place of a model in it.

* Each mini-batch is padded to a number of rows that follows from its job alone.
* A stack has 4, 8, 16 or 32 models on a CPU, and 128 on an accelerator. The constructor of
  `ConstantStack` fills free places with copies of the last job. When trainings have ended and the
  stack shrinks, `ConstantStack.batches` fills free places with rows of the first job.
* PyTorch rounds the last numbers of an array differently if they do not fill a register of the
  processor. Four models with eight rows each always fill the registers. Only one thread runs,
  because several threads would divide the arrays. No trial replaces this rule, because a trial
  would rarely meet such a difference. Because the rule covers only arrays with one row per example,
  models with other arrays train in another form (`consists_of_rows`).

On an accelerator only deterministic kernels run (`deterministic_kernels`). These compute every
number of an array in the same way, so models with image layers may use this form there.

The size of the stack and a model's place in it might still change the rounding, for example of
matrix products. A trial tests this before a shape is used (`many.stack_rounds_alike`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flower_ext.training.batched.form import Form, longest_first
from flower_ext.training.batched.mapped import BY_CHANNEL
from flower_ext.training.batched.stack import IGNORED, MiniBatches, Stack, jobs_that_fit
from flower_ext.training.isolation import deterministic_kernels, products_are_reproducible
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.kind import TrainingKind
from flower_ext.training.params import Params, clone
from flower_ext.training.task import Task

SIZES = (4, 8, 16, 32)
"""Possible numbers of models in a stack. A stack of 4 takes as long as 5 models that train one
by one, and a stack of 32 as long as 14."""
_ON_ACCELERATOR = (128,)
_ROWS = 8
"""The number of rows of a mini-batch is a multiple of this number."""


class Shape(NamedTuple):
    """The rows of a mini-batch, and whether a job uses momentum, SAM, and terms beside the loss.

    The number of rows is the size of a job's largest mini-batch, rounded up to a power of two that
    is at least 8. It never exceeds the batch size, rounded up to a multiple of 8. Because of the
    rounding, many jobs have the same shape.
    """

    rows: int
    has_momentum: bool
    climbs: bool
    has_terms: bool

    @classmethod
    def of(cls, job: Job) -> Shape:
        """Return the shape for a job."""
        training = job.training
        most = -(-training.batch_size // _ROWS) * _ROWS
        longest = min(len(job.examples), training.batch_size)
        rows = min(most, max(_ROWS, 1 << (longest - 1).bit_length()))
        return cls(rows, training.momentum > 0, training.sam_radius > 0, bool(job.objective))

    @property
    def settings(self) -> LocalTraining:
        """The settings with which trials train stacks of this shape: one short epoch."""
        return LocalTraining(
            epochs=1,
            batch_size=self.rows,
            momentum=0.9 * self.has_momentum,
            sam_radius=0.1 * self.climbs,
        )


@lru_cache(maxsize=64)
def consists_of_rows(training_kind: TrainingKind) -> bool:
    """Return True if models of this kind may train in stacks of constant shape."""
    on_cpu = training_kind.device.type == "cpu"
    if on_cpu and not products_are_reproducible():
        return False
    # Other losses never see the padded rows (`Stack`), so their arrays have other shapes.
    classifies = training_kind.loss is cross_entropy and training_kind.targets.dim() == 1
    # Unknown layers may transform weights in any way.
    task = training_kind.task
    if not (classifies or task.compares_examples) or not task.factory.facts.known_holders:
        return False
    # Arrays of image layers do not have one row per example.
    layers = training_kind.model().modules()
    return not (on_cpu and any(isinstance(layer, BY_CHANNEL) for layer in layers))


def sizes_on(device: torch.device) -> tuple[int, ...]:
    """Return the numbers of models that a stack may have on a device."""
    return SIZES if device.type == "cpu" else _ON_ACCELERATOR


def jobs_for_trial(device: torch.device) -> int:
    """Return how many jobs a trial trains together.

    On a CPU, the jobs are one more than the second largest stack holds. The trial therefore begins
    with the largest stack, and continues with the second largest when a job has ended.
    """
    return SIZES[-2] + 1 if device.type == "cpu" else _ON_ACCELERATOR[0]


@dataclass(frozen=True)
class ConstantShape(Form):
    """The form that trains jobs of one `Shape` in stacks. Stacks speed up small models."""

    training_kind: TrainingKind
    shape: Shape
    batch_invariant = True

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield groups of the jobs of this shape.

        Two kinds of jobs are left out, whatever the other jobs are:

        * a job whose model is so large that the largest stack of such models would exceed
          ``memory_limit`` or the processor's caches; a stack that exceeds the caches is not faster
        * a job with an `IGNORED` target, because that target would change how the loss of the whole
          stack is computed
        """
        most = sizes_on(self.training_kind.device)[-1]
        members = [
            index
            for index, job in enumerate(jobs)
            if Shape.of(job) == self.shape
            and jobs_that_fit(self.training_kind.task, job, memory_limit) >= most
            and IGNORED not in job.examples.targets
        ]
        order = longest_first(jobs, members)
        return (order[start : start + most] for start in range(0, len(order), most))

    def train(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the models of a group, as `Form.train` does."""
        with deterministic_kernels(self.training_kind.device):
            models = ConstantStack(self.training_kind.task, jobs, trained, self.shape.rows).train()
        return {n: w[: len(jobs)].to(jobs[0].params[n]) for n, w in models.items()}


class ConstantStack(Stack):
    """A stack with a fixed size (one of `sizes_on`) and fixed mini-batches (``rows`` rows each)."""

    def __init__(
        self, task: Task, jobs: Sequence[Job], trained: Callable[[str], bool], rows: int
    ) -> None:
        self._sizes = sizes_on(task.torch_device())
        missing = self._size(len(jobs)) - len(jobs)
        # Copies need generators of their own, because a job draws its mini-batches only once.
        copies = [replace(jobs[-1], generator=torch.Generator()) for _ in range(missing)]
        super().__init__(task, [*jobs, *copies], trained)
        self._rows, self._ended = rows, clone(self.weights)

    def train(self) -> Params:
        """Run `Stack.train`, and return each model as it was when its job ended."""
        super().train()
        return self._ended

    def batches(self) -> Iterator[MiniBatches]:
        """Yield mini-batches of the jobs that still train, padded to the size of the stack."""
        before = len(self.jobs)
        for x, y, counts in super().batches():
            self._end(slice(len(x), before))
            before, size = len(x), self._size(len(x))
            counts += counts[:1] * (size - before)
            yield MiniBatches(self._padded(x, size), self._padded(y, size), counts)
        self._end(slice(before))

    def _end(self, jobs: slice) -> None:
        for name, weight in self.weights.items():
            self._ended[name][jobs] = weight[jobs]

    def _padded(self, part: Tensor, size: int) -> Tensor:
        """Pad ``part`` from (jobs, batch, …) to (``size``, `_rows`, …) by copies of first rows."""
        count, rows = part.shape[:2]
        padded = part.new_empty((size, self._rows, *part.shape[2:]))
        padded[:count, :rows], padded[:count, rows:] = part, part[:, :1]
        padded[count:] = padded[:1]
        return padded

    def _size(self, count: int) -> int:
        return next(size for size in self._sizes if size >= count)
