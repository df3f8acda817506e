"""Mini-batches for a stack of jobs: in each step, one from every job that still trains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flower_ext.training.index_limits import require_usable, usable_rows
from flower_ext.training.job import Job, batch_rows
from flower_ext.training.task import Task


class MiniBatches(NamedTuple):
    """One mini-batch of each job that still trains.

    Features and targets have shape (jobs, batch, …). The first ``counts`` examples of each
    mini-batch are real, and the rest is padding.
    """

    x: Tensor
    y: Tensor
    counts: list[int]


def mini_batches_of(task: Task, jobs: Sequence[Job]) -> Iterator[MiniBatches]:
    """Yield the mini-batches of each step. The first of ``jobs`` must have the most steps."""
    device = task.torch_device()
    orders = [[*batch_rows(len(job.examples), job.training, job.generator)] for job in jobs]
    features, targets = (
        _Rows([getattr(job.examples, part).detach() for job in jobs], device)
        for part in ("features", "targets")
    )
    if features.joined is not None and targets.joined is not None:
        usable = usable_rows(task, features.joined, targets.joined)
        for job in jobs if not usable.all() else ():
            require_usable(task, job.examples)
    # Copy the examples once per epoch: a copy in each step would be one small copy per job.
    longest = jobs[0]
    ahead = max(1, len(longest.examples) // longest.training.batch_size)
    for start in range(0, longest.num_steps, ahead):
        epoch = [order[start : start + ahead] for order in orders if start < len(order)]
        x, y = features.selected(epoch), targets.selected(epoch)
        for step in range(len(epoch[0])):
            counts = [len(steps[step]) for steps in epoch if step < len(steps)]
            real = slice(len(counts)), step, slice(max(counts))
            yield MiniBatches(x[real], y[real], counts)


class _Rows:
    """The features of all jobs, or the targets of all jobs, on the device that trains.

    An accelerator gets the rows of all jobs as one tensor, because one copy per job would take
    longer than the job's training.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors, self.joined = tensors, None
        if device.type != "cpu":
            self.joined = torch.cat([*tensors]).to(device)

    def selected(self, epoch: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the mini-batches with the row numbers in ``epoch``: (jobs, steps, rows, …).

        ``epoch`` holds for each job, and for each of its steps, the row numbers of a mini-batch.
        """
        width = max(len(rows) for steps in epoch for rows in steps)
        shape = (len(epoch), len(epoch[0]), width, *self.tensors[0].shape[1:])
        orders = [torch.cat([_padded(rows, width) for rows in steps]) for steps in epoch]
        if self.joined is not None:
            return self._from_joined(orders, len(epoch[0]) * width).view(shape)
        selected = self.tensors[0].new_empty(shape)
        for place, tensor, rows in zip(selected.unbind(), self.tensors, orders, strict=False):
            torch.index_select(tensor, 0, rows, out=place.flatten(0, 1)[: len(rows)])
        return selected

    def _from_joined(self, orders: Sequence[Tensor], length: int) -> Tensor:
        """Return ``length`` rows of each job, one job after the other.

        ``orders`` holds the row numbers of each job. If there are fewer than ``length``, the first
        of them is repeated.
        """
        assert self.joined is not None
        first, moved = 0, []
        for tensor, rows in zip(self.tensors, orders, strict=False):
            moved.append(_padded(rows, length) + first)
            first += len(tensor)
        return self.joined.index_select(0, torch.cat(moved).to(self.joined.device))


def _padded(rows: Tensor, length: int) -> Tensor:
    """Return ``length`` row numbers: ``rows``, and then the first of them again and again."""
    return rows if len(rows) == length else torch.cat([rows, rows[:1].expand(length - len(rows))])
