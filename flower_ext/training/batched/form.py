"""Interface of forms, which are ways to train many jobs together.

The forms of this package are in `stack` and `constant_shape`. A plug-in may offer another form, for
example one that trains by machine code: it registers a `FormFactory` as an entry point in the group
`GROUP`. Only `many` decides which form trains which jobs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from flower_ext.training.job import Job
from flower_ext.training.params import Params
from flower_ext.training.task import Task

MEMORY_LIMIT = 2**30
"""Bytes that one group of jobs may take, unless the caller chooses another limit."""
GROUP = "flower_ext.forms"
"""Group of the entry points by which plug-ins offer a form."""


class Form(Protocol):
    """A way to train jobs whose examples have one shape and type.

    A form may decline jobs. For a job that it accepts, it must return what `local.train` returns,
    up to rounding. If a model has code that the package does not know, `many` first compares the
    results of the form and of `local.train` on random jobs.
    """

    batch_invariant: bool
    """True if no bit of a model depends on the rest of its group, as user-level guarantees need."""

    def __hash__(self) -> int:
        """Return a hash, under which the process stores whether a trial accepted the form."""
        return id(self)

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterable[list[int]]:
        """Yield the indices of the jobs that this form trains, as groups to train together."""

    def train(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Train a group of jobs; return parameters by name, with one row per job.

        Row k of each tensor is what `local.train` returns for the k-th job, up to rounding. The
        method raises an error if ``trained`` selects nothing.
        """

    def gains_alone(self, job: Job) -> bool:
        """Return True if this form trains a single job at least as fast as PyTorch does."""
        return False


FormFactory = Callable[[Task, Job], Form | None]
"""Returns the form for jobs like the given one; None if the plug-in cannot train them faster.

The factory returns the same form for all jobs of a kind, so that a trial runs only once.
"""


def longest_first(jobs: Sequence[Job], members: Iterable[int]) -> list[int]:
    """Sort the indices ``members``: jobs with more steps first, then jobs with more examples.

    Neighbours in this order have mini-batches of similar size, so they need little padding.
    """
    return sorted(members, key=lambda i: (-jobs[i].num_steps, -len(jobs[i].examples)))
