"""Groups of trainings on stacked parameters: which jobs share a batch, and how many fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.training.batched.batchable import why_apart
from flower_ext.training.batched.descent import Stack
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.batched.mapped import MappedModel
from flower_ext.training.local import Job
from flower_ext.training.params import Params
from flower_ext.training.task import Task

_CACHE = 12 * 2**20
"""Bytes of parameters and activations in a batch on a CPU; more would leave its caches."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096


class InBatches:
    """Trainings on stacked parameters (a `Form`), for jobs to which `why_apart` does not object."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield groups, the longest job first in each; jobs that gain nothing are left out.

        A batch narrows as its jobs end, so jobs that would outlast all others are left out. Among
        jobs of equal length those with similar numbers of examples are neighbours, to pad less.
        """
        if len(jobs) < 2:
            return
        order = sorted(range(len(jobs)), key=lambda i: (-jobs[i].num_steps, -len(jobs[i].examples)))
        steps = [jobs[i].num_steps for i in order]
        fewest = MappedModel.fewest
        worth = (i for i in range(len(jobs)) if sum(steps[i:]) >= fewest * max(steps[i], 1))
        left = order[next(worth, len(jobs)) :]
        while left:
            size = together(self.task, jobs[left[0]], memory_limit)
            group, left = left[:size], left[size:]
            if len(group) > 1:
                yield group

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Train a group, as `Form.minimise` does."""
        like = jobs[0].params
        weights = Stack(self.task, jobs, trained).minimise()
        return {n: w.to(like[n].device, like[n].dtype) for n, w in weights.items()}


def groups(task: Task, jobs: Sequence[Job], memory_limit: int = MEMORY_LIMIT) -> list[list[int]]:
    """Return groups of jobs that are best trained together, as indices, the longest job first.

    All jobs of a group have examples of one shape and type. Jobs that `InBatches` leaves out form
    groups of one.
    """
    batches: list[list[int]] = []
    for members in alike(jobs):
        similar = [jobs[index] for index in members]
        if len(similar) > 1 and why_apart(task, similar) is None:
            groups_of_similar = InBatches(task).groups(similar, memory_limit)
            batches += [[members[index] for index in group] for group in groups_of_similar]
    batched = {index for batch in batches for index in batch}
    return batches + [[index] for index in range(len(jobs)) if index not in batched]


def alike(jobs: Sequence[Job]) -> list[list[int]]:
    """Group jobs whose examples have one shape and type."""
    members = defaultdict(list)
    for index, job in enumerate(jobs):
        members[job.examples.form].append(index)
    return [*members.values()]


def together(task: Task, job: Job, memory_limit: int) -> int:
    """Return how many jobs like this one fit into ``memory_limit`` bytes; at least one."""
    features, rows = job.examples.features, min(len(job.examples), job.training.batch_size)
    numbers = sum(p.numel() for p in job.params.values())
    activations = rows * _activations(task.model, features.shape[1:], features.dtype)
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
