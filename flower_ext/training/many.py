"""Many local trainings as one batch: stacked parameters, padded mini-batches, one backward pass.

Each job keeps its own model, examples, settings, terms and batch order; what comes out is what
`train` makes of the jobs one by one, up to the order of floating-point sums. Every parameter is one
tensor with a first dimension of jobs, so momentum, SAM and terms cost a few operations for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy, linear
from torch.overrides import TorchFunctionMode

from flower_ext.data import Examples
from flower_ext.training.local import LocalTraining, batch_rows, predict, score, train
from flower_ext.training.objective import Linear, Proximal, Term
from flower_ext.training.params import Params
from flower_ext.training.task import Task

MEMORY_LIMIT = 2**30
"""Bytes that one batch of trainings may take, unless the caller says otherwise."""
_CACHE = 2**22
"""Bytes of parameters in a batch on a CPU: more leave the caches and gain nothing."""
_TOGETHER_ELSEWHERE = 4096
_FEWEST = 5
"""Models below which one after the other is faster than a batch."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One local training among many; the arguments of `train`."""

    params: Mapping[str, Tensor]
    examples: Examples
    training: LocalTraining
    generator: torch.Generator
    terms: Sequence[Term] = ()


def train_many(
    task: Task,
    jobs: Sequence[Job],
    *,
    trained: Callable[[str], bool] = lambda name: True,
    memory_limit: int = MEMORY_LIMIT,
) -> list[Params]:
    """What `train` returns for each job, in their order.

    Jobs that cannot be trained together, or would not gain by it, are trained one by one.

    Parameters
    ----------
    memory_limit : int
        Bytes for parameters, gradients, examples and activations of one batch (estimated).

    Raises
    ------
    ValueError, NotConverged
        As `train`.
    """
    results: dict[int, Params] = {}
    for group in groups(task, jobs, memory_limit):
        chosen = [jobs[index] for index in group]
        if len(chosen) == 1:
            (job,) = chosen
            model = train(
                task,
                job.params,
                job.examples,
                job.training,
                trained=trained,
                terms=job.terms,
                generator=job.generator,
            )
            results[group[0]] = model
        else:
            results |= zip(group, Stack(task, chosen, trained).minimise(), strict=True)
    return [results[index] for index in range(len(jobs))]


def groups(task: Task, jobs: Sequence[Job], memory_limit: int = MEMORY_LIMIT) -> list[list[int]]:
    """Which jobs are best trained together: their indices, the longest first in each group.

    A batch narrows as its jobs end, so those that would outlast all others are groups of one.
    """
    order = sorted(range(len(jobs)), key=lambda i: -_steps(jobs[i]))
    steps = [_steps(jobs[i]) for i in order]
    lonely = len(jobs)
    if why_apart(task, jobs) is None:
        worth = (i for i in range(len(jobs)) if sum(steps[i:]) >= _FEWEST * max(steps[i], 1))
        lonely = next(worth, len(jobs))
    rest = order[lonely:]
    size = together(task, jobs[rest[0]], memory_limit) if rest else 1
    chunks = [rest[start : start + size] for start in range(0, len(rest), size)]
    return [*([index] for index in order[:lonely]), *chunks]


def why_apart(task: Task, jobs: Sequence[Job]) -> str | None:
    """Why these jobs are better trained one by one; None if they are not."""
    if len(jobs) < _FEWEST:
        return "too few to gain"
    if any(job.training.tolerance for job in jobs):
        return "exact minimisers are found one by one"
    if any(not isinstance(term, Proximal | Linear) for job in jobs for term in job.terms):
        return "a term other than Proximal and Linear"
    device = task.torch_device()
    for module in task.model().modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "batch normalisation changes the model while it is evaluated"
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return "dropout draws other numbers in a batch of models"
        if isinstance(module, nn.RNNBase):
            return "recurrent layers have no batched form"
        if isinstance(module, nn.modules.conv._ConvNd) and device.type == "cpu":
            return "convolutions of many models are slower in a batch on a CPU"
    return None


def together(task: Task, job: Job, memory_limit: int) -> int:
    """How many jobs like this one fit into ``memory_limit`` bytes; at least one."""
    numbers = sum(p.numel() for p in job.params.values())
    most = _TOGETHER_ELSEWHERE
    if task.torch_device().type == "cpu":
        most = max(_FEWEST, _CACHE // (4 * numbers))
    batch = job.examples.features[: job.training.batch_size]
    example = math.prod(job.examples.features.shape[1:])
    # Weights, their views' gradients, the flat gradient, velocity, terms, and SAM's second point.
    needed = 4 * (8 * numbers + len(job.examples) * example + 3 * _activations(task, job, batch))
    return int(max(1, min(most, memory_limit // needed)))


def _activations(task: Task, job: Job, batch: Tensor) -> int:
    """Numbers that the layers put out for one batch."""
    count = 0

    def add(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal count
        count += output.numel() if isinstance(output, Tensor) else 0

    model = task.model()
    hooks = [module.register_forward_hook(add) for module in model.modules()]
    with torch.no_grad():
        functional_call(model, {n: p.cpu() for n, p in job.params.items()}, (batch.cpu(),))
    for hook in hooks:
        hook.remove()
    return count + batch.numel()


def _steps(job: Job) -> int:
    return job.training.num_steps(len(job.examples))


class Stack:
    """A batch of jobs, sorted from the longest to the shortest.

    ``weights`` are the trained parameters by name, each with a first dimension of jobs.
    """

    def __init__(self, task: Task, jobs: Sequence[Job], trained: Callable[[str], bool]) -> None:
        if any(len(job.examples) == 0 for job in jobs):
            raise ValueError("cannot train on a client without examples")
        self.task, self.jobs = task, jobs
        self.device = task.torch_device()
        self.model = task.model().to(self.device).train()
        self.names = [name for name, _ in self.model.named_parameters() if trained(name)]
        if not self.names:
            raise ValueError("trained selects no parameter of the model")
        frozen = [name for name in jobs[0].params if name not in self.names]
        params = [job.params for job in jobs]
        self.weights, self.rest = self._stacked(params, self.names), self._stacked(params, frozen)
        self.batches = Batches(jobs, self.device)

    def minimise(self) -> list[Params]:
        """SGD with momentum, or SAM, on every job to its own end."""
        rate, momentum, radius = (
            torch.tensor([getattr(job.training, name) for job in self.jobs], device=self.device)
            for name in ("learning_rate", "momentum", "sam_radius")
        )
        velocity = {}
        if bool(momentum.any()):
            velocity = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        terms = self.terms()
        for x, y, counts in self.batches:
            active = len(x)
            now, rest = first(self.weights, active), first(self.rest, active)
            step = self.slope(now, rest, x, y, counts, terms)
            if bool(radius.any()):
                norm = _norms(step)
                climb = torch.where(norm > 0, radius[:active] / norm, 0.0)
                above = {n: torch.addcmul(w, step[n], along(climb, w)) for n, w in now.items()}
                step = self.slope(above, rest, x, y, counts, terms)
            for name, w in now.items():
                if velocity:
                    own = velocity[name][:active]
                    step[name] = own.mul_(along(momentum[:active], own)).add_(step[name])
                w.addcmul_(step[name], along(rate[:active], w), value=-1.0)
        return self.models(self.weights)

    def slope(
        self,
        point: Params,
        rest: Params,
        x: Tensor,
        y: Tensor,
        counts: Sequence[int],
        terms: Mapping[str, tuple[Tensor, Tensor]],
    ) -> Params:
        """Each job's gradient of its loss and ``terms`` at ``point``; see `Batches`, `terms`."""
        leaves = {name: w.detach().requires_grad_() for name, w in point.items()}
        value = self._loss({**rest, **leaves}, x, y, counts)
        slopes = torch.autograd.grad(value, list(leaves.values()))
        found = dict(zip(leaves, slopes, strict=True))
        for name, (slope, offset) in terms.items():
            active = len(x)
            found[name].addcmul_(along(slope[:active], point[name]), point[name])
            found[name].add_(offset[:active])
        return found

    def _loss(self, params: Params, x: Tensor, y: Tensor, counts: Sequence[int]) -> Tensor:
        """Sum over jobs of the mean loss on the first ``counts`` examples of their mini-batches."""
        if len(x) < _FEWEST:
            alone = [
                self.task.loss(
                    functional_call(self.model, {n: p[row] for n, p in params.items()}, (own[:n],)),
                    y[row, :n],
                )
                for row, (own, n) in enumerate(zip(x, counts, strict=True))
            ]
            return torch.stack(alone).sum()
        with _ContiguousSlopes():
            outputs = vmap(lambda own, features: functional_call(self.model, own, (features,)))(
                params, x
            )
        width = x.shape[1]
        if min(counts) == width:
            return vmap(self.task.loss)(outputs, y).sum()
        number = torch.tensor(counts, device=self.device).unsqueeze(1)
        share = (torch.arange(width, device=self.device) < number) / number
        return (self._losses(outputs, y) * share).sum()

    def _losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every single example; `Task.loss` is a mean of them."""
        if self.task.loss is cross_entropy:
            each = cross_entropy(outputs.flatten(0, 1), y.flatten(0, 1), reduction="none")
            return each.view(y.shape[:2])

        def alone(output: Tensor, target: Tensor) -> Tensor:
            return self.task.loss(output.unsqueeze(0), target.unsqueeze(0))

        return vmap(vmap(alone))(outputs, y)

    def terms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The gradient of all terms of a job is slope · w + offset, name by name."""
        slopes = torch.zeros(len(self.jobs), device=self.device)
        offsets = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for row, job in enumerate(self.jobs):
            terms = [*job.terms]
            if job.training.proximal_weight:
                terms.append(Proximal(weight=job.training.proximal_weight, anchor=job.params))
            for term in terms:
                for name, offset in offsets.items():
                    if isinstance(term, Proximal):
                        offset[row] -= term.weight * term.anchor[name].to(self.device)
                    elif isinstance(term, Linear):
                        offset[row] += term.direction[name].to(self.device)
                slopes[row] += term.weight if isinstance(term, Proximal) else 0.0
        needed = any(job.terms or job.training.proximal_weight for job in self.jobs)
        return {name: (slopes, offset) for name, offset in offsets.items()} if needed else {}

    def _stacked(self, many: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> Params:
        return {n: torch.stack([one[n].detach().to(self.device) for one in many]) for n in names}

    def models(self, weights: Mapping[str, Tensor]) -> list[Params]:
        """Each job's whole model with ``weights`` in place, where its own parameters were."""
        return [
            {
                name: weights[name][row].to(p.device, p.dtype) if name in weights else p
                for name, p in job.params.items()
            }
            for row, job in enumerate(self.jobs)
        ]


class _ContiguousSlopes(TorchFunctionMode):
    """Linear layers as W xᵀ instead of x Wᵀ: the slope of a batch of W then lies as W does.

    The other way round it is a transposed view, which costs more to add than to compute.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is linear and args[0].dim() == 2 and not kwargs:
            x, weight, *bias = args
            y = torch.matmul(weight, x.transpose(0, 1)).transpose(0, 1)
            return y if not bias or bias[0] is None else y + bias[0]
        return func(*args, **(kwargs or {}))


def first(params: Mapping[str, Tensor], active: int) -> Params:
    """Of the first ``active`` jobs only: views."""
    return {name: p[:active] for name, p in params.items()}


def along(values: Tensor, like: Tensor) -> Tensor:
    """One value a job, in a shape that multiplies ``like``."""
    return values.to(like.dtype).view(-1, *(1 for _ in like.shape[1:]))


def _norms(params: Mapping[str, Tensor]) -> Tensor:
    """L2 norm of each job over all its parameters."""
    squares = [p.flatten(1).square().sum(dim=1) for p in params.values()]
    return torch.stack(squares).sum(dim=0).sqrt()


class Batches:
    """The mini-batches of all jobs, step by step, in each job's own order.

    Yields (features, targets, counts): of shape (jobs that still train, batch, …), and how many
    examples of each mini-batch are real; the rest is padding.
    """

    def __init__(self, jobs: Sequence[Job], device: torch.device) -> None:
        self.device = device
        self.steps = [_steps(job) for job in jobs]
        longest = max(len(job.examples) for job in jobs)
        width = min(longest, max(job.training.batch_size for job in jobs))
        first = jobs[0].examples
        shape = (len(jobs), longest)
        self.features = first.features.new_zeros((*shape, *first.features.shape[1:]), device=device)
        self.targets = first.targets.new_zeros((*shape, *first.targets.shape[1:]), device=device)
        rows = torch.zeros((self.steps[0], len(jobs), width), dtype=torch.long)
        self.counts: list[list[int]] = [[] for _ in range(self.steps[0])]
        for number, job in enumerate(jobs):
            self.features[number, : len(job.examples)] = job.examples.features
            self.targets[number, : len(job.examples)] = job.examples.targets
            drawn = batch_rows(len(job.examples), job.training, job.generator)
            for step, chosen in enumerate(drawn):
                rows[step, number, : len(chosen)] = chosen
                self.counts[step].append(len(chosen))
        self.rows = rows.to(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        jobs = torch.arange(len(self.steps), device=self.device).unsqueeze(1)
        for chosen, counts in zip(self.rows, self.counts, strict=True):
            active, width = len(counts), max(counts)
            where = jobs[:active], chosen[:active, :width]
            yield self.features[where], self.targets[where], counts


def evaluate_many(
    task: Task, models: Sequence[Mapping[str, Tensor]], examples: Sequence[Examples]
) -> list[dict[str, float]]:
    """What `evaluate` returns for each model on its own examples.

    Examples of clients that share one model (the same object) go through it together.
    """
    sharing: dict[int, list[int]] = {}
    for index, model in enumerate(models):
        sharing.setdefault(id(model), []).append(index)
    scores: dict[int, dict[str, float]] = {}
    for members in sharing.values():
        own = [examples[index] for index in members]
        outputs = predict(task, models[members[0]], torch.cat([one.features for one in own]))
        parts = torch.split(outputs, [len(one) for one in own])
        for index, one, part in zip(members, own, parts, strict=True):
            scores[index] = score(task, part, one.targets.to(part.device))
    return [scores[index] for index in range(len(models))]
