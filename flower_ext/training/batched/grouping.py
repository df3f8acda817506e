"""Groups of trainings on stacked parameters: which jobs share a batch, and how many fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.training.batched.batchable import depends_on_company, in_company, why_apart
from flower_ext.training.batched.descent import IGNORED, Stack, models_for
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.local import Job
from flower_ext.training.params import Params
from flower_ext.training.task import Task

_CACHE = 12 * 2**20
"""Bytes of parameters and activations in a batch on a CPU; more would leave its caches."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096


class InBatches:
    """Trainings on stacked parameters (a `Form`), for jobs to which `why_apart` does not object.

    With ``steady`` no model depends on the jobs that train beside it.
    """

    def __init__(self, task: Task, *, steady: bool = False) -> None:
        self.task, self.steady = task, steady

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield groups, the longest job first in each; jobs that gain nothing are left out.

        A batch narrows as its jobs end, so jobs that would outlast all others are left out. Among
        jobs of equal length those with similar numbers of examples are neighbours, to pad less.
        """
        if not self.steady and len(jobs) < 2:
            return
        kind = self._kind if self.steady else _size
        order = sorted(range(len(jobs)), key=lambda i: (-jobs[i].num_steps, *kind(jobs[i])))
        steps = [jobs[i].num_steps for i in order]
        fewest = 0 if self.steady else models_for(self.task, jobs[0]).fewest
        worth = (i for i in range(len(jobs)) if sum(steps[i:]) >= fewest * max(steps[i], 1))
        rest = order[next(worth, len(jobs)) :]
        of_one_kind = groupby(rest, lambda i: kind(jobs[i]) if self.steady else None)
        for left in ([*members] for _, members in of_one_kind):
            while left:
                size = together(self.task, jobs[left[0]], memory_limit)
                group, left = left[:size], left[size:]
                alone = len(group) == 1
                if self.steady:
                    alone = depends_on_company(self.task, jobs[group[0]])
                if not alone:
                    yield group

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Train a group, as `Form.minimise` does."""
        like = jobs[0].params
        rows = Stack(self.task, in_company(jobs) if self.steady else jobs, trained).minimise()
        return {n: w[: len(jobs)].to(like[n].device, like[n].dtype) for n, w in rows.items()}

    @staticmethod
    def _kind(job: Job) -> tuple[float, ...]:
        """Return the size and everything else that changes how a batch computes."""
        training, ignores = job.training, IGNORED in job.examples.targets
        ways = (training.momentum > 0, training.sam_radius > 0, bool(job.objective))
        return -job.num_steps, -len(job.examples), training.batch_size, ignores, *ways


def _size(job: Job) -> tuple[float, ...]:
    return (-len(job.examples),)


def groups(task: Task, jobs: Sequence[Job], memory_limit: int = MEMORY_LIMIT) -> list[list[int]]:
    """Return groups of jobs that are best trained together, as indices, the longest job first.

    All jobs of a group have examples of one shape and type. Jobs that `InBatches` leaves out form
    groups of one.
    """
    found: list[list[int]] = []
    for members in alike(jobs):
        own = [jobs[index] for index in members]
        if len(own) > 1 and why_apart(task, own) is None:
            batches = InBatches(task).groups(own, memory_limit)
            found += [[members[index] for index in group] for group in batches]
    together = {index for group in found for index in group}
    return found + [[index] for index in range(len(jobs)) if index not in together]


def alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Group jobs whose examples have one shape and type."""
    found = defaultdict(list)
    for index, job in enumerate(jobs):
        found[job.examples.form].append(index)
    return [*found.values()]


def together(task: Task, job: Job, memory_limit: int) -> int:
    """Return how many jobs like this one fit into ``memory_limit`` bytes; at least one."""
    numbers = sum(p.numel() for p in job.params.values())
    features = job.examples.features
    batch = min(job.training.batch_size, len(features))
    activations = batch * _activations(task.model, features.shape[1:], features.dtype)
    most = _TOGETHER_ELSEWHERE
    if task.torch_device().type == "cpu":
        most = max(_LEAST_TOGETHER, _CACHE // (4 * (numbers + activations)))
    # Counted are weights, their gradient, velocity, terms and SAM's second point; also what layers
    # keep for the backward pass, and the pass itself.
    needed = 4 * (8 * numbers + features.numel() + 3 * activations)
    return int(max(1, min(most, memory_limit // needed)))


@lru_cache(maxsize=64)
def _activations(build: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype) -> int:
    """Count the numbers in all layers' outputs for one example, and in the example itself."""
    count = 2 * math.prod(shape)

    def add(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        nonlocal count
        if isinstance(module, nn.RNNBase):  # a step keeps gates, their slopes and its states
            steps = inputs[0].numel() // module.input_size
            gates = sum(len(p) for n, p in module.named_parameters() if n.startswith("weight_hh"))
            count += 3 * steps * gates
        elif isinstance(output, Tensor):
            count += output.numel()

    model = build()
    for module in model.modules():
        module.register_forward_hook(add)
    with torch.no_grad():
        model(torch.zeros((2, *shape), dtype=dtype))  # some layers refuse a single example
    return count // 2
