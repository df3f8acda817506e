"""Groups of trainings on stacked parameters: which jobs are alike, and how many fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.training.job import Job
from flower_ext.training.task import Task

_CACHE = 12 * 2**20
"""Bytes of parameters and activations in a batch on a CPU; more would leave its caches."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096


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
