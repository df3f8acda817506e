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
from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.batched.mapped import MappedModel
from flower_ext.training.job import Job
from flower_ext.training.task import Task

_CACHE = 12 * 2**20
"""Bytes of parameters and activations in a batch on a CPU; more would leave its caches."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096


def groups(task: Task, jobs: Sequence[Job], memory_limit: int = MEMORY_LIMIT) -> list[list[int]]:
    """Return groups of jobs that are best trained together, as indices, the longest job first.

    All jobs of a group have examples of one shape and type. Jobs that gain nothing in a batch form
    groups of one.
    """
    every: list[list[int]] = []
    for members in alike(jobs):
        every += _groups_of_alike(task, jobs, longest_first(jobs, members), memory_limit)
    return every


def _groups_of_alike(
    task: Task, jobs: Sequence[Job], order: list[int], memory_limit: int
) -> Iterator[list[int]]:
    """Yield groups of jobs that are alike, given by their indices, the longest job first.

    A batch narrows as its jobs end, so jobs that would outlast all others are left out.
    """
    start = len(order)
    if len(order) > 1 and why_apart(task, [jobs[index] for index in order]) is None:
        steps = [jobs[index].num_steps for index in order]
        # From the first job on that would keep enough others busy until its own end.
        worth = (
            i for i in range(len(order)) if sum(steps[i:]) >= MappedModel.fewest * max(steps[i], 1)
        )
        start = next(worth, start)
    yield from ([index] for index in order[:start])
    left = order[start:]
    while left:
        size = together(task, jobs[left[0]], memory_limit)
        yield left[:size]
        left = left[size:]


def longest_first(jobs: Sequence[Job], members: Sequence[int]) -> list[int]:
    """Return indices of jobs in the order of their steps.

    Among jobs of equal length those with similar numbers of examples are neighbours, to pad less.
    """
    return sorted(members, key=lambda i: (-jobs[i].num_steps, -len(jobs[i].examples)))


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
        if isinstance(output, Tensor):
            count += output.numel()

    model = build()
    for module in model.modules():
        module.register_forward_hook(add)
    with torch.no_grad():
        model(torch.zeros((2, *shape), dtype=dtype))  # some layers refuse a single example
    return count // 2
