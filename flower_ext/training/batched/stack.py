"""The form that trains models in stacks of any size, with one backward pass for a whole stack.

SGD and SAM run on padded mini-batches. For each parameter, one tensor holds the values in all
models. Each job keeps its own model, examples, settings, terms and batch order.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from flower_ext.errors import InvalidValue
from flower_ext.training.batched.form import Form, longest_first
from flower_ext.training.batched.mapped import BatchLoss, MappedModel, Target, stacked
from flower_ext.training.index_limits import require_usable, usable_rows
from flower_ext.training.isolation import draws_generator
from flower_ext.training.job import Job, batch_rows
from flower_ext.training.models.dropout import Draws
from flower_ext.training.models.factory import ModelFactory, in_training
from flower_ext.training.params import Params, flat_rows
from flower_ext.training.problem import affine
from flower_ext.training.task import Task

IGNORED = -100
"""Target value that cross_entropy leaves out of its mean."""
_CACHE = 12 * 2**20
"""Most bytes of parameters and activations of a stack on a CPU, so that they stay in its caches."""
_LEAST_TOGETHER = 8
_TOGETHER_ELSEWHERE = 4096


@lru_cache(maxsize=64)
def _models(factory: ModelFactory, device: torch.device) -> MappedModel:
    """Return a `MappedModel`, which computes several models at once."""
    return MappedModel(in_training(factory.on(device)))


class MiniBatches(NamedTuple):
    """One mini-batch of each job that still trains.

    Features and targets have shape (jobs, batch, …). The first ``counts[k]`` examples of
    job k are real, and the rest is padding.
    """

    x: Tensor
    y: Tensor
    counts: list[int]


class Stack:
    """A group of jobs that train together; the job with the most steps comes first.

    ``weights`` are the trained parameters by name. Each has the jobs as its first dimension.
    """

    def __init__(self, task: Task, jobs: Sequence[Job], trained: Callable[[str], bool]) -> None:
        self.task, self.jobs = task, jobs
        self.device = task.torch_device()
        self.models = _models(task.factory, self.device)
        self.names = [name for name in self.models.parameters if trained(name)]
        if not self.names:
            raise InvalidValue("trained selects no parameter of the model: expected at least one")
        params = {
            name: stacked([job.params[name] for job in jobs], self.device)
            for name in jobs[0].params
        }
        self.weights = {name: params.pop(name) for name in self.names}
        self.dtype = self.weights[self.names[0]].dtype
        self.rest = params
        self.generators = [
            draws_generator(job.generator) if self.models.draws else None for job in jobs
        ]
        # If True, all examples of a job weigh the same, so one call computes the loss of all jobs.
        self.classifies = task.loss is cross_entropy and not any(
            IGNORED in job.examples.targets for job in jobs
        )

    def train(self) -> Params:
        """Train all jobs by SGD, with momentum and SAM where set; return ``weights``."""
        rate, momentum, radius = (
            self.numbers([getattr(job.training, name) for job in self.jobs])
            for name in ("learning_rate", "momentum", "sam_radius")
        )
        terms = self.terms()
        if not terms and not momentum.any() and not radius.any():
            for batch in self.batches():  # the backward pass moves the weights itself
                weights = first_models(self.weights, len(batch.x))
                targets = {name: Target(w, factor=-1.0) for name, w in weights.items()}
                self._add_gradients(weights, batch, targets, rate[: len(batch.x)])
            return self.weights
        velocity = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for batch in self.batches():
            active = len(batch.x)
            weights = first_models(self.weights, active)
            point = weights
            if radius.any():
                point = self._climbed(weights, batch, terms, radius[:active])
            steps = first_models(velocity, active)
            # The backward pass adds gradients to velocities in place. Without momentum the
            # velocities are 0.
            for v in steps.values():
                v.mul_(per_model(momentum[:active], v))
            self._add_gradients(point, batch, {n: Target(v) for n, v in steps.items()})
            _add_terms(steps, terms, point)
            for name, w in weights.items():
                w.addcmul_(steps[name], per_model(rate[:active], w), value=-1.0)
        return self.weights

    def _climbed(
        self,
        point: Params,
        batch: MiniBatches,
        terms: Mapping[str, tuple[Tensor, Tensor]],
        radius: Tensor,
    ) -> Params:
        """Return the points at which SAM computes gradients: unmoved for a job with radius 0."""
        gradients = {name: torch.zeros_like(w) for name, w in point.items()}
        targets = {name: Target(g) for name, g in gradients.items()}
        # A copy of the features, because a model may write into them. Jobs that do not climb draw
        # no random numbers, because they would draw none if trained alone.
        copied = batch._replace(x=batch.x.clone())
        self._add_gradients(point, copied, targets, climbs=(radius > 0).tolist())
        _add_terms(gradients, terms, point)
        # torch.sum over a stack of these tensors would round differently for each number of models.
        norms = reduce(torch.add, (flat_rows(g).square().sum(dim=1) for g in gradients.values()))
        norms = norms.sqrt()
        scale = torch.where(norms > 0, radius / norms, 0.0)
        return {n: torch.addcmul(w, gradients[n], per_model(scale, w)) for n, w in point.items()}

    def _add_gradients(
        self,
        point: Params,
        batch: MiniBatches,
        targets: Mapping[str, Target],
        factors: Tensor | None = None,
        climbs: Sequence[bool] | None = None,
    ) -> None:
        """Add each job's gradient of its loss, times its factor, to ``targets``."""
        everything = {**first_models(self.rest, len(batch.x)), **point}
        generators = self.generators[: len(batch.x)]
        if climbs is not None:
            generators = [g if climb else None for g, climb in zip(generators, climbs, strict=True)]
        loss, draws = self._loss(batch, factors), Draws(generators, batch.counts)
        self.models.gradient(everything, batch.x, loss, targets, draws)

    def _loss(self, batch: MiniBatches, factors: Tensor | None) -> BatchLoss:
        """Return a function that sums the jobs' mean losses, each multiplied by its factor.

        The means leave out padding. Without ``factors``, each factor is 1.
        """
        _, y, counts = batch
        number = self.numbers(counts).unsqueeze(1)
        real = torch.arange(y.shape[1], device=self.device) < number
        share = real / number if factors is None else real / number * factors.unsqueeze(1)
        loss = self.task.loss

        def summed(outputs: Tensor) -> Tensor:
            if self.classifies and outputs.dim() == 3:
                losses = cross_entropy(outputs.flatten(0, 1), y.flatten(0, 1), reduction="none")
                return torch.dot(losses, share.flatten())
            scale = share.sum(dim=1)
            if self.task.compares_examples:
                return torch.dot(vmap(loss)(outputs, y, real), scale)
            total = scale.new_zeros(())
            for count in set(counts):  # the loss may be any function, so it never sees padding
                models = [model for model, number in enumerate(counts) if number == count]
                losses = vmap(loss)(outputs[models, :count], y[models, :count])
                total = total + torch.dot(losses, scale[models])
            return total

        return summed

    def batches(self) -> Iterator[MiniBatches]:
        """Yield the mini-batches of all jobs, step by step, in each job's own order."""
        jobs = self.jobs
        orders = [[*batch_rows(len(job.examples), job.training, job.generator)] for job in jobs]
        features, targets = (
            _Rows([getattr(job.examples, part).detach() for job in jobs], self.device)
            for part in ("features", "targets")
        )
        if features.joined is not None and targets.joined is not None:
            usable = usable_rows(self.task, features.joined, targets.joined)
            for job in jobs if not usable.all() else ():
                require_usable(self.task, job.examples)
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

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Return ``values``, one number for each job, as a tensor with the weights' type."""
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def terms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return a pair (factor, offset) for each parameter, by name.

        The gradient of the jobs' terms at w is factor · w + offset.
        """
        if not any(job.objective for job in self.jobs):
            return {}
        slopes = torch.zeros(len(self.jobs), dtype=self.dtype, device=self.device)
        offsets = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        for row, job in enumerate(self.jobs):
            for slope, scale, vector in affine(job.objective):
                slopes[row] += slope
                for name, offset in offsets.items():
                    offset[row].add_(vector[name].to(self.device), alpha=scale)
        return {name: (slopes, offset) for name, offset in offsets.items()}


class _Rows:
    """The features of all jobs, or the targets of all jobs, on the device that trains.

    An accelerator gets the rows of all jobs as one tensor, because one copy per job would take
    longer than the job's training.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors = tensors
        self.joined = None if device.type == "cpu" else torch.cat([*tensors]).to(device)

    def selected(self, epoch: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return the mini-batches of an epoch as a tensor of shape (jobs, steps, rows, …).

        ``epoch`` holds for each job, and for each of its steps, the row numbers of a mini-batch.
        """
        width = max(len(rows) for steps in epoch for rows in steps)
        shape = (len(epoch), len(epoch[0]), width, *self.tensors[0].shape[1:])
        orders = [torch.cat([_padded(rows, width) for rows in steps]) for steps in epoch]
        if self.joined is not None:
            starts = accumulate(map(len, self.tensors), initial=0)
            length = len(epoch[0]) * width
            moved = [
                _padded(rows, length) + start for rows, start in zip(orders, starts, strict=False)
            ]
            return self.joined.index_select(0, torch.cat(moved).to(self.joined.device)).view(shape)
        selected = self.tensors[0].new_empty(shape)
        for place, tensor, rows in zip(selected.unbind(), self.tensors, orders, strict=False):
            torch.index_select(tensor, 0, rows, out=place.flatten(0, 1)[: len(rows)])
        return selected


def _padded(rows: Tensor, length: int) -> Tensor:
    """Return ``length`` row numbers: ``rows``, and then copies of the first number."""
    return rows if len(rows) == length else torch.cat([rows, rows[:1].expand(length - len(rows))])


@dataclass(frozen=True)
class Stacked(Form):
    """Stacks of any size. A model's rounding errors depend on the size of its stack."""

    task: Task
    batch_invariant = False

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> Iterator[list[int]]:
        """Yield groups of jobs, the longest job first; leave out jobs that a stack makes no faster.

        When a job ends, its model leaves the stack. A job with far more steps than all others would
        spend most of them alone in the stack, so it is left out.
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
            size = jobs_that_fit(self.task, jobs[left[0]], memory_limit)
            if size > 1:
                yield left[:size]
            left = left[size:]

    def train(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Return the models of a group, as `Form.train` does."""
        like = jobs[0].params
        return {n: w.to(like[n]) for n, w in Stack(self.task, jobs, trained).train().items()}


def jobs_that_fit(task: Task, job: Job, memory_limit: int) -> int:
    """Return how many jobs like this fit into ``memory_limit`` and a CPU's caches; at least one."""
    features, rows = job.examples.features, min(len(job.examples), job.training.batch_size)
    numbers = sum(p.numel() for p in job.params.values())
    on_cpu = task.torch_device().type == "cpu"
    activations = rows * _activations(
        task.model, features.shape[1:], features.dtype, by_products=not on_cpu
    )
    most = _TOGETHER_ELSEWHERE
    if on_cpu:
        most = max(_LEAST_TOGETHER, _CACHE // (4 * (numbers + activations)))
    # This counts weights, their gradient, velocity, terms and SAM's second point, the tensors that
    # layers keep for the backward pass, and the tensors of the pass itself.
    needed = 4 * (8 * numbers + features.numel() + 3 * activations)
    return int(max(1, min(most, memory_limit // needed)))


@lru_cache(maxsize=64)
def _activations(
    build: Callable[[], nn.Module], shape: torch.Size, dtype: torch.dtype, *, by_products: bool
) -> int:
    """Return how many numbers a pass of one example holds: its features and all layers' outputs.

    ``by_products`` also counts the patches that each kernel of a convolution multiplies.
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


def first_models(params: Mapping[str, Tensor], active: int) -> Params:
    """Return views of the parameters of the first ``active`` jobs."""
    return {name: p[:active] for name, p in params.items()}


def per_model(values: Tensor, like: Tensor) -> Tensor:
    """Reshape ``values``, one per job, so that each multiplies its job's part of ``like``."""
    return values.to(like.dtype).view(-1, *(1 for _ in like.shape[1:]))


def _add_terms(
    slopes: Params, terms: Mapping[str, tuple[Tensor, Tensor]], point: Mapping[str, Tensor]
) -> None:
    """Add the gradient of ``terms`` at ``point`` to a gradient or velocity; see `Stack.terms`."""
    for name, (factor, offset) in terms.items():
        active = len(point[name])
        slopes[name].addcmul_(per_model(factor[:active], point[name]), point[name])
        slopes[name].add_(offset[:active])
