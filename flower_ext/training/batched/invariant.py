"""Batches in which no bit of a model depends on the models that train beside it.

How a library rounds a number depends on the shape of its array, and on its position there. In these
batches a job alone determines both, except for two things: the number of models in the batch, and
the position of the job's model among them. Three rules see to that:

* The rows of a mini-batch are padded to a number that follows from the job alone.
* There are 4, 8, 16 or 32 models. Copies of a job fill a batch up, and models whose training has
  ended stay in it until the next smaller size.
* The last numbers of an array may not fill a register, and PyTorch rounds these in another way.
  Four models with eight rows each leave no such numbers. Only one thread runs, because several
  would divide the arrays. A trial cannot replace these rules: such a number differs too rarely.
  Models are left out if their arrays do not consist of rows: models with image layers, and models
  whose own code may transform weights.

`_rounds_alike` tests everything else that may depend on size and position, such as matrix products.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.training.batched.batchable import random_job, trains_alike, why_not_batched
from flower_ext.training.batched.batches import longest_first, together
from flower_ext.training.batched.descent import IGNORED, MiniBatches, Stack
from flower_ext.training.batched.form import Form
from flower_ext.training.batched.mapped import BY_CHANNEL
from flower_ext.training.job import Job, LocalTraining
from flower_ext.training.params import Params, clone, shaken
from flower_ext.training.problem import Proximal
from flower_ext.training.rounding import products_are_reproducible
from flower_ext.training.task import Task
from flower_ext.training.trials.trial_examples import ODD, TrainingKind, kind_of, with_odd_rows

_SIZES = (4, 8, 16, 32)
"""Numbers of models in a batch: 4 take as long as 5 one by one, and 32 as long as 14."""
_ROWS = 8
"""The number of rows of a mini-batch is a multiple of this number."""
_TRIED = (range(8, 17), range(0, 17, 2), range(3, 9), range(1, 9), range(12, 16), [0], [11])
"""The jobs that `_rounds_alike` trains together, from those that it numbers 0 … 16."""


class InvariantStack(Stack):
    """A stack of 4, 8, 16 or 32 models, whose mini-batches all have ``rows`` rows."""

    def __init__(
        self, task: Task, jobs: Sequence[Job], trained: Callable[[str], bool], rows: int
    ) -> None:
        missing = _size(len(jobs)) - len(jobs)
        # Copies need generators of their own, because a job draws its mini-batches only once.
        copies = [replace(jobs[-1], generator=torch.Generator()) for _ in range(missing)]
        super().__init__(task, [*jobs, *copies], trained)
        self._rows, self._ended = rows, clone(self.weights)

    def minimise(self) -> Params:
        """Run `Stack.minimise`; return each model as it was when its own training ended."""
        super().minimise()
        return self._ended

    def batches(self) -> Iterator[MiniBatches]:
        """Yield mini-batches of the jobs that still train, and of others that fill the batch up."""
        before = len(self.jobs)
        for x, y, counts in super().batches():
            self._end(slice(len(x), before))
            before, size = len(x), _size(len(x))
            counts += counts[:1] * (size - before)
            yield MiniBatches(self._padded(x, size), self._padded(y, size), counts)
        self._end(slice(before))

    def _end(self, jobs: slice) -> None:
        for name, weight in self.weights.items():
            self._ended[name][jobs] = weight[jobs]

    def _padded(self, part: Tensor, size: int) -> Tensor:
        """Return features or targets of ``size`` models in `_rows` rows, with some repeated."""
        count, rows = part.shape[:2]
        padded = part.new_empty((size, self._rows, *part.shape[2:]))
        padded[:count, :rows], padded[:count, rows:] = part, part[:, :1]
        padded[count:] = padded[:1]
        return padded


class InvariantBatches(Form):
    """Batches of small models on a CPU, in which no bit of a model depends on the others."""

    batch_invariant = True

    def __init__(self, kind: TrainingKind) -> None:
        self._kind = kind

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield groups of jobs whose mini-batches have equally many rows.

        A job is left out if 32 jobs of its kind would not fit into memory, or not into the
        processor's caches: such a batch would gain nothing. The job alone decides this, not the
        others.
        """
        alike, most = defaultdict(list), _SIZES[-1]
        for index, job in enumerate(jobs):
            # A target that is ignored would change how the loss of the whole batch is computed.
            if together(self._kind.task, job, memory_limit) >= most and not _ignores(job):
                way = job.training.momentum > 0, job.training.sam_radius > 0, bool(job.objective)
                alike[_padded_rows(job), way].append(index)
        for (rows, way), members in alike.items():
            if _rounds_alike(self._kind, rows, *way):
                order = longest_first(jobs, members)
                yield from (order[start : start + most] for start in range(0, len(order), most))

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the models of a group, as `Form.minimise` does."""
        models = _trained(self._kind.task, jobs, trained)
        return {n: w.to(jobs[0].params[n]) for n, w in models.items()}


def invariant_batches(task: Task, job: Job) -> Form | None:
    """Return the batched form for jobs like ``job``.

    Return None if the size of the batch, or the job's position in it, might change a bit of its
    model.
    """
    if task.torch_device().type != "cpu" or not products_are_reproducible():
        return None
    # Other losses never see the padded rows (`Stack`), so their arrays have other shapes.
    classifies = task.loss is cross_entropy and job.examples.targets.dim() == 1
    if not (classifies or task.compares_examples):
        return None
    if not task.factory.facts.known_holders or why_not_batched(task, [job]):
        return None
    form = _form(kind_of(task, job.examples.features, job.examples.targets, job.params))
    if form is None or not (task.factory.facts.known or trains_alike(task, job, form)):
        return None
    return form


@lru_cache(maxsize=64)
def _form(kind: TrainingKind) -> InvariantBatches | None:
    by_channel = any(isinstance(layer, BY_CHANNEL) for layer in kind.model().modules())
    return None if by_channel else InvariantBatches(kind)


@lru_cache(maxsize=256)
def _rounds_alike(kind: TrainingKind, rows: int, momentum: bool, sam: bool, terms: bool) -> bool:
    """Return True if random models round alike in batches of every size, and beside odd examples.

    False is certain; True is evidence, and for this processor only. The result depends on nobody's
    data.
    """
    training = LocalTraining(
        epochs=1, batch_size=rows, momentum=0.9 * momentum, sam_radius=0.1 * sam
    )

    def job(number: int, odd: float | None) -> Job:
        made = random_job(kind, 1 + number * (2 * rows - 1) // 16)  # of one or two steps
        features, targets = made.examples.features, made.examples.targets
        if odd is not None:
            features = with_odd_rows(features, slice(None), odd)
        return replace(
            made,
            params=shaken(made.params, made.generator),
            examples=Examples(features, targets),
            training=training,
            terms=[Proximal(weight=0.1, anchor=made.params)] * terms,
        )

    def models(numbers: Sequence[int], odd: Sequence[float | None] = (None,)) -> dict[int, Params]:
        order = sorted(numbers, reverse=True)  # the longest job first
        jobs = [job(number, odd[number % len(odd)]) for number in order]
        rows_of = _trained(kind.task, jobs, lambda name: True)
        return {k: {n: w[row] for n, w in rows_of.items()} for row, k in enumerate(order)}

    usual = models(range(17))
    among_odd = models(range(17), [part for odd in ODD for part in (None, odd)])
    others = [{k: among_odd[k] for k in range(0, 17, 2)}, *map(models, _TRIED)]
    return all(
        torch.equal(weight, usual[number][name])
        for company in others
        for number, model in company.items()
        for name, weight in model.items()
    )


def _trained(task: Task, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        models = InvariantStack(task, jobs, trained, _padded_rows(jobs[0])).minimise()
    finally:
        torch.set_num_threads(threads)
    return {name: weight[: len(jobs)] for name, weight in models.items()}


def _size(count: int) -> int:
    return next(size for size in _SIZES if size >= count)


def _padded_rows(job: Job) -> int:
    """Return the rows of a job's padded mini-batches: one of few numbers, so that jobs share it."""
    most = -(-job.training.batch_size // _ROWS) * _ROWS
    longest = min(len(job.examples), job.training.batch_size)
    return min(most, max(_ROWS, 1 << (longest - 1).bit_length()))


def _ignores(job: Job) -> bool:
    return IGNORED in job.examples.targets
