"""The form that trains any job, by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flower_ext.training.batched.form import Form, longest_first
from flower_ext.training.job import Job
from flower_ext.training.local import train
from flower_ext.training.params import Params
from flower_ext.training.task import Task


@dataclass(frozen=True)
class OneByOne(Form):
    """Trainings by `local.train`, the longest first."""

    task: Task
    batch_invariant = True

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield each job by itself."""
        return ([index] for index in longest_first(jobs, range(len(jobs))))

    def train(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the model of a group of one, as `Form.train` does."""
        model = train(self.task, jobs[0], trained=trained)
        # Copies, because untrained parameters may be the job's own.
        return {name: p.clone().unsqueeze(0) for name, p in model.items()}
