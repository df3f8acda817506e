"""Batches of models by vmap, whose numbers depend on how many they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flower_ext.training.batched.batchable import why_apart
from flower_ext.training.batched.descent import Stack
from flower_ext.training.batched.grouping import longest_first, together
from flower_ext.training.batched.mapped import MappedModel
from flower_ext.training.job import Job
from flower_ext.training.params import Params
from flower_ext.training.task import Task


@dataclass(frozen=True)
class Batches:
    """Batches of any size (a `Form`)."""

    task: Task
    batch_invariant = False

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield groups of jobs, the longest job first; leave out those that gain nothing.

        A batch narrows as its jobs end, so jobs that would outlast all others are left out.
        """
        if len(jobs) < 2 or why_apart(self.task, jobs) is not None:
            return
        order = longest_first(jobs, range(len(jobs)))
        steps = [jobs[index].num_steps for index in order]
        # From the first job on that would keep enough others busy until its own end.
        worth = (
            i for i in range(len(order)) if sum(steps[i:]) >= MappedModel.fewest * max(steps[i], 1)
        )
        left = order[next(worth, len(order)) :]
        while len(left) > 1:
            size = together(self.task, jobs[left[0]], memory_limit)
            if size > 1:
                yield left[:size]
            left = left[size:]

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the models of a group, as `Form.minimise` does."""
        like = jobs[0].params
        return {n: w.to(like[n]) for n, w in Stack(self.task, jobs, trained).minimise().items()}

    def gains_alone(self, job: Job) -> bool:
        """Return False: a batch of one takes as long as five trainings by `train`."""
        return False
