"""The form that trains models in stacks of any size, by `vmap`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from flower_ext.training.batched.form import Form, longest_first
from flower_ext.training.batched.mapped import MappedModel
from flower_ext.training.batched.stack import Stack
from flower_ext.training.job import Job
from flower_ext.training.params import Params
from flower_ext.training.task import Task

_CACHE = 12 * 2**20
"""Most bytes of parameters and activations of a batch on a CPU, so that they stay in its caches."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096


@dataclass(frozen=True)
class Stacked(Form):
    """Stacks of any size. A model's rounding errors depend on the size of its stack."""

    task: Task
    batch_invariant = False

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield groups of jobs, the longest job first; leave out jobs that gain nothing.

        A stack narrows as its jobs end, so a job gains nothing if it would outlast all others.
        """
        order = longest_first(jobs, range(len(jobs)))
        steps = [jobs[index].num_steps for index in order]
        # Leave out the longest jobs, until the remaining jobs together have at least `fewest` times
        # the steps of the longest remaining job.
        worth = (
            i for i in range(len(order)) if sum(steps[i:]) >= MappedModel.fewest * max(steps[i], 1)
        )
        left = order[next(worth, len(order)) :]
        while len(left) > 1:
            size = together(self.task, jobs[left[0]], memory_limit)
            if size > 1:
                yield left[:size]
            left = left[size:]

    def train(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the models of a group, as `Form.train` does."""
        like = jobs[0].params
        return {n: w.to(like[n]) for n, w in Stack(self.task, jobs, trained).train().items()}


def together(task: Task, job: Job, memory_limit: int) -> int:
    """Return how many jobs like this one fit into ``memory_limit`` bytes; at least one."""
    features, rows = job.examples.features, min(len(job.examples), job.training.batch_size)
    numbers = sum(p.numel() for p in job.params.values())
    on_cpu = task.torch_device().type == "cpu"
    activations = rows * _activations(
        task.model, features.shape[1:], features.dtype, by_products=not on_cpu
    )
    most = _TOGETHER_ELSEWHERE
    if on_cpu:
        most = max(_LEAST_TOGETHER, _CACHE // (4 * (numbers + activations)))
    # This counts weights, their gradient, velocity, terms and SAM's second point. It also counts
    # what layers keep for the backward pass, and the pass itself.
    needed = 4 * (8 * numbers + features.numel() + 3 * activations)
    return int(max(1, min(most, memory_limit // needed)))


@lru_cache(maxsize=64)
def _activations(
    build: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype, *, by_products: bool
) -> int:
    """Count the numbers in all layers' outputs for one example, and in the example itself.

    If convolutions are products of matrices, also count the patches that each kernel multiplies.
    """
    count = 2 * math.prod(shape)

    def add(module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        nonlocal count
        if isinstance(output, Tensor):
            count += output.numel()
            if by_products and isinstance(module, nn.Conv2d):
                patch = math.prod(module.kernel_size) * module.in_channels
                count += output.numel() // module.out_channels * patch

    model = build()
    for module in model.modules():
        module.register_forward_hook(add)
    with torch.no_grad():
        model(torch.zeros((2, *shape), dtype=dtype))  # some layers refuse a single example
    return count // 2
