"""Chains of layers, each trained from its first step to its last by machine code.

One thread trains all networks of dense layers. Two threads would take as long, because models would
move between their caches. Networks with convolutions are divided among as many threads as PyTorch
uses.

`form_for` is the entry point of this plug-in. Where machine code cannot train a model, or was not
compiled, it returns None, and the model trains as without the plug-in.
"""

import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from logging import getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_ext.data import Examples
from flower_ext.errors import InvalidValue
from flower_ext.training.isolation import draws_generator
from flower_ext.training.job import Job
from flower_ext.training.kind import kind_of
from flower_ext.training.models.dropout import draw_bits, draws_needed
from flower_ext.training.params import Params, Sizes, sizes
from flower_ext.training.problem import affine
from flower_ext.training.task import Task
from flower_ext.training.trials.single_rows import refusing_layer
from flower_ext_kernels.chain import Layer, recognise_chain
from flower_ext_kernels.layer_table import (
    ACTIVATION,
    BIAS,
    COLUMNS,
    DROPOUT,
    GROUPS,
    IMAGE_NORM,
    INPUTS,
    KIND,
    LINE,
    NORM,
    OUTPUTS,
    PRECEDING_INPUTS,
    SETTING,
    TRAINS_BIAS,
    TRAINS_WEIGHT,
    WEIGHT,
)

log = getLogger("flwr")

_MOST_TOGETHER = 2**22
"""Most numbers in the models of a group, per thread: 16 MB. Training fills the processor's caches,
and so does the Python code that uses the models. In large groups, the two alternate less often,
which is faster."""
_MOST_DRAWN = 2**24
"""Most memory, in 32-bit numbers, for all draws of dropout in one training: 64 MB."""
_MOST_OUTPUTS = 2**15
"""Limit on the outputs of all layers for one example: up to it, this plug-in trains one network
with convolutions as fast as PyTorch does on many threads."""
_FEW_THREADS = 2
"""Most threads that count as few for the limits below."""
_MOST_ON_FEW, _MOST_ON_MANY = 2**26, 2**21
"""Limits on (numbers of a network) · (rows of a mini-batch) for training a single network.

Up to the first limit, this plug-in trains a network of dense layers as fast as PyTorch on few
threads; up to the second, as fast as PyTorch on more threads. The first limit is measured. The
second is computed for 4 to 16 threads, from 110 GFLOP/s in this plug-in, and from 55 GFLOP/s per
thread and 0.12 ms per step in PyTorch.
"""
_NO_OFFSET, _NO_DRAWS = torch.zeros(0), torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The position and shape of one parameter in the array that holds all numbers of a network.

    In this array, the weight of a convolution has the shape (kernel height, kernel width, channels,
    filters). In PyTorch it has the shape (filters, channels, kernel height, kernel width).
    """

    start: int
    shape: torch.Size

    @property
    def slice(self) -> slice:
        """Slice of the network's array that holds this parameter."""
        return slice(self.start, self.start + self.shape.numel())

    @property
    def is_permuted(self) -> bool:
        """True if the order of the parameter's numbers differs from PyTorch's."""
        return len(self.shape) == 4

    def lay_out(self, parameter: Tensor) -> Tensor:
        """Return the numbers of a parameter in the order of the network's array."""
        permuted = parameter.permute(2, 3, 1, 0) if self.is_permuted else parameter
        return permuted.flatten()

    def extract(self, rows: Tensor) -> Tensor:
        """Return this parameter for all networks, stacked; ``rows`` has one network per row."""
        numbers = rows[:, self.slice]
        if not self.is_permuted:
            return numbers.view(-1, *self.shape)
        filters, channels, height, width = self.shape
        return numbers.view(-1, height, width, channels, filters).permute(0, 4, 3, 1, 2)


class CompiledNetwork:
    """A form of training, by machine code, for models that are a chain of layers.

    One array holds all numbers of a model, and a table describes its layers.
    """

    batch_invariant = True
    """True, because each model trains by itself. No other model changes the order of its sums."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers, self.parts = layers, dict[str, Part]()
        self.size = 0
        for layer in layers:
            for leaf, parameter in layer.module.named_parameters():
                self.parts[f"{layer.name}.{leaf}"] = Part(start=self.size, shape=parameter.shape)
                self.size += parameter.numel()
        # Every model begins on a cache line, so that two threads never write to the same one.
        self.size = math.ceil(self.size / LINE) * LINE
        self._dropout_widths = [layer.inputs for layer in layers if layer.kind == DROPOUT]
        self.has_images = any(layer.window is not None for layer in layers)
        """True if a layer works on images."""

    def takes(self, jobs: Sequence[Job]) -> list[bool]:
        """Return, for each job, True if machine code can train it.

        A job's parameters and features must be float32 on the CPU, and its targets int64 classes
        below the number of outputs of the last layer.
        """
        starts = {id(job.params): job.params for job in jobs}  # jobs often share their start
        suitable = {key: all(map(_is_float32_on_cpu, ps.values())) for key, ps in starts.items()}
        targets = [
            _contiguous(job.examples.targets)
            if suitable[id(job.params)] and _has_supported_types(job.examples)
            else None
            for job in jobs
        ]
        in_range = np.empty(len(jobs), np.int64)
        addresses = np.array([0 if classes is None else classes.data_ptr() for classes in targets])
        counts = np.array([0 if classes is None else classes.shape[0] for classes in targets])
        _library().are_classes(addresses, counts, len(jobs), self.layers[-1].outputs, in_range)
        pairs = zip(targets, in_range, strict=True)
        return [classes is not None and bool(valid) for classes, valid in pairs]

    def groups(self, jobs: Sequence[Job], memory_limit: int) -> list[list[int]]:
        """Return groups of indices of jobs, for `train` to train together.

        A group is as large as the memory for its models and random numbers permits. Jobs that
        `takes` refuses, or that need too much memory while they train, are in no group.
        """
        group_limit, remaining = min(_MOST_TOGETHER * self._count_threads(), memory_limit // 16), 0
        groups: list[list[int]] = []
        for index, taken in enumerate(self.takes(jobs)):
            num_draws = self._count_draws(jobs[index]) if taken else 0
            large = 2 * num_draws > _MOST_DRAWN or self._working_bytes(jobs[index]) > memory_limit
            if not taken or large:
                continue
            needed = self.size + 2 * num_draws
            if not groups or needed > remaining:
                groups.append([])
                remaining = group_limit
            groups[-1].append(index)
            remaining -= needed
        return groups

    def train(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """Train each job as `local.train` does; return the trained parameters, one row per job.

        Raises
        ------
        ValueError
            ``trained`` selects nothing.
        """
        names = [name for name in self.parts if trained(name)]
        if not names:
            raise InvalidValue("trained selects no parameter of the model: expected at least one")
        rows = torch.empty(len(jobs), self.size)
        starts = {id(job.params): job.params for job in jobs}  # jobs often share their start
        initial_rows = {key: self._join(params, self.parts) for key, params in starts.items()}
        arrays: list[tuple[Tensor, ...]] = []  # keeps the arrays alive while the code runs
        floats, integers, counts, rates, drawn = [], [], [], [], []
        for row, job in enumerate(jobs):
            training, examples = job.training, job.examples
            count, size, steps = len(examples), training.batch_size, job.num_steps
            features, targets = _contiguous(examples.features), _contiguous(examples.targets)
            draws = self._draw(job)  # first, because drawing batches changes the generator
            order = _order(count, math.ceil(steps / math.ceil(count / size)), job.generator)
            pull, offset = self._terms(job, names)
            arrays.append((features, targets, order, offset, draws))
            drawn.append(draws.data_ptr())
            weights, start = rows.data_ptr() + 4 * self.size * row, initial_rows[id(job.params)]
            floats.append((weights, start.data_ptr(), features.data_ptr(), offset.data_ptr()))
            integers.append((targets.data_ptr(), order.data_ptr()))
            counts.append((count, size, steps, offset is not _NO_OFFSET))
            rates.append((training.learning_rate, training.momentum, training.sam_radius, pull))
        columns = [np.array(column) for column in (floats, integers, drawn, counts, rates)]
        table, memory_sizes = self._table(names), self._memory_sizes(max(map(_batch_size, jobs)))

        def train_slice(begin: int, end: int) -> None:
            memory = [torch.empty(size).numpy() for size in memory_sizes]
            slices = [column[begin:end] for column in columns]
            _library().train(*slices, end - begin, table, len(self.layers), self.size, *memory)

        # Each thread has its own working memory, and trains neighbouring jobs.
        threads = min(self._count_threads(), len(jobs))
        ends = [len(jobs) * thread // threads for thread in range(threads + 1)]
        with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
            run = map if pool is None else pool.map
            list(run(train_slice, ends, ends[1:]))
        return {name: self.parts[name].extract(rows) for name in names}

    def _join(self, params: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
        """Return a network's array with the parameters ``names``, and zeros elsewhere."""
        row = torch.zeros(self.size)
        for name in names:
            part = self.parts[name]
            row[part.slice] = part.lay_out(params[name].detach())
        return row

    def _terms(self, job: Job, names: Sequence[str]) -> tuple[float, Tensor]:
        """Return (pull, offset), where the job's extra terms have the gradient pull · w + offset.

        Without extra terms, they are 0 and `_NO_OFFSET`.
        """
        if not (terms := job.objective):
            return 0.0, _NO_OFFSET
        pull, offset = 0.0, torch.zeros(self.size)
        for coefficient, scale, direction in affine(terms):
            pull += coefficient
            offset.add_(self._join(direction, names), alpha=scale)
        return pull, offset

    def _count_draws(self, job: Job) -> int:
        """Return how many 64-bit numbers dropout draws in a training."""
        if not self._dropout_widths:
            return 0
        size = job.training.batch_size
        full_batches, rest = divmod(len(job.examples), size)
        per_full_batch, per_last_batch = (
            sum(draws_needed(rows * width) for width in self._dropout_widths)
            for rows in (size, rest)
        )
        per_epoch = full_batches * per_full_batch + per_last_batch
        epochs, more_steps = divmod(job.num_steps, full_batches + (rest > 0))
        forward_passes = 2 if job.training.sam_radius > 0 else 1
        return forward_passes * (epochs * per_epoch + more_steps * per_full_batch)

    def _draw(self, job: Job) -> Tensor:
        """Draw all random numbers of dropout in a training, pass after pass."""
        count = self._count_draws(job)
        return draw_bits(count, draws_generator(job.generator)) if count else _NO_DRAWS

    def gains_alone(self, job: Job) -> bool:
        """Return True if machine code on one thread trains a job at least as fast as PyTorch.

        PyTorch may use more threads, but a small network has little work to divide among them.
        """
        threads = torch.get_num_threads()
        if self.has_images:
            small = sum(layer.outputs for layer in self.layers) <= _MOST_OUTPUTS
            return small or threads <= _FEW_THREADS
        most = _MOST_ON_FEW if threads <= _FEW_THREADS else _MOST_ON_MANY
        return threads == 1 or self.size * _batch_size(job) <= most

    def _count_threads(self) -> int:
        """Return how many threads share the jobs."""
        return torch.get_num_threads() if self.has_images else 1

    def _memory_sizes(self, rows: int) -> list[int]:
        """Return the sizes of the five arrays in which one thread works.

        They are the last arguments of `sgd.train`: ``outputs``, ``gradients``, ``scratch``,
        ``norm_memory`` and ``model_scratch``.
        """
        widths = [layer.outputs for layer in self.layers]
        numbers = rows * (self.layers[0].inputs + sum(widths))
        has_norms = any(layer.kind in (NORM, IMAGE_NORM) for layer in self.layers)
        scratch = max(layer.scratch_size for layer in self.layers)
        return [numbers, numbers, scratch, 2 * numbers if has_norms else 0, 3 * self.size]

    def _working_bytes(self, job: Job) -> int:
        """Return the bytes of all threads' working arrays; 0 for networks without images."""
        if not self.has_images:
            return 0
        return 4 * self._count_threads() * sum(self._memory_sizes(_batch_size(job)))

    def _table(self, trained: Sequence[str]) -> np.ndarray:
        """Return the table of layers that `sgd` reads."""
        table, preceding_inputs = np.zeros((len(self.layers), COLUMNS), np.int64), 0
        for row, layer in zip(table, self.layers, strict=True):
            weight, bias = f"{layer.name}.weight", f"{layer.name}.bias"
            row[KIND], row[ACTIVATION] = layer.kind, layer.activation
            row[INPUTS], row[OUTPUTS] = layer.inputs, layer.outputs
            row[PRECEDING_INPUTS] = preceding_inputs
            row[WEIGHT], row[BIAS] = self._start(weight), self._start(bias)
            row[TRAINS_WEIGHT], row[TRAINS_BIAS] = weight in trained, bias in trained
            row[GROUPS], row[SETTING] = layer.groups, layer.setting
            if layer.window is not None:
                layer.window.write_columns(row)
            preceding_inputs += layer.inputs
        return table

    def _start(self, name: str) -> int:
        """Return where a parameter begins in the network's array; −1 without such a parameter."""
        return self.parts[name].start if name in self.parts else -1


def _batch_size(job: Job) -> int:
    """Return the number of examples in a mini-batch."""
    return min(len(job.examples), job.training.batch_size)


def _contiguous(values: Tensor) -> Tensor:
    return values if values.is_contiguous() else values.contiguous()


def _is_float32_on_cpu(numbers: Tensor) -> bool:
    """Return True for float32 numbers on the CPU."""
    return numbers.dtype == torch.float32 and numbers.is_cpu


def _has_supported_types(examples: Examples) -> bool:
    """Return True for float32 features on the CPU, and one int64 target per example."""
    features, targets = examples.features, examples.targets
    if not (_is_float32_on_cpu(features) and targets.dtype == torch.int64):
        return False
    return bool(targets.dim() == 1 and targets.is_cpu)


def _order(count: int, epochs: int, generator: torch.Generator) -> Tensor:
    """Return the indices of ``count`` examples in their order of use, epoch after epoch."""
    if epochs == 1:
        return torch.randperm(count, generator=generator)
    orders = [torch.randperm(count, generator=generator) for _ in range(epochs)]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *orders])  # there may be no epoch


def form_for(task: Task, job: Job) -> CompiledNetwork | None:
    """Return the form that trains jobs like this one, or None if machine code cannot."""
    if task.loss is not functional.cross_entropy or task.torch_device().type != "cpu":
        return None
    if not _has_supported_types(job.examples):
        return None
    features, targets = job.examples.features, job.examples.targets
    if refusing_layer(kind_of(task, features, targets, {})) is not None:  # as `local` does
        return None
    network = _network(task.model, features.shape[1:], sizes(job.params))
    return network if network is not None and _library() is not None else None


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return the functions of `sgd`; None if they cannot run here, or are not compiled yet."""
    if platform.machine().lower() not in ("x86_64", "amd64") or platform.system() == "Windows":
        return None
    try:
        from flower_ext_kernels.native import Library  # LLVM takes 25 MB

        return Library()
    except (ImportError, RuntimeError) as error:  # no code was compiled, or LLVM refuses it
        log.info("dense and convolutional networks would train faster: %s", error)
        return None


def _has_hooks(model: nn.Module) -> bool:
    """Return True if a module has hooks or replaces its call, because a chain runs neither."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(
        "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
        or any(getattr(module, kind) for kind in kinds)
        for module in model.modules()
    )


@lru_cache(maxsize=64)
def _network(
    build: Callable[[], nn.Module], shape: torch.Size, parameters: Sizes
) -> CompiledNetwork | None:
    """Return the network of a model that is a chain of known layers, else None."""
    model = build().train()
    if _has_hooks(model) or not all(parameter.requires_grad for parameter in model.parameters()):
        return None
    layers = recognise_chain(model, shape)
    widths = [shape.numel(), *(layer.outputs for layer in layers)]
    if not layers or widths[:-1] != [layer.inputs for layer in layers]:
        return None
    network = CompiledNetwork(layers)
    # Each layer with parameters is used once, and no other layer has its parameters.
    used = sum(len([*layer.module.parameters()]) for layer in layers)
    used_once = used == len(network.parts) == len([*model.parameters()])
    expected = {name: part.shape for name, part in network.parts.items()}
    return network if used_once and dict(parameters) == expected else None
