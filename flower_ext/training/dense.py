"""Networks of dense layers, each trained from its first step to its last by compiled code.

One thread does it all: two take as long, as models move between their caches.

`compiled` needs Numba (``pip install 'flower_ext[fast]'``); without it, and where it would not be
faster, `network` finds none, and these models train in batches like all others.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from logging import getLogger
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from flower_ext.training.layout import LINE, PLAIN, RELU, SIGMOID, TANH
from flower_ext.training.local import Job
from flower_ext.training.objective import affine
from flower_ext.training.params import Params, Sizes, sizes
from flower_ext.training.stacked import hooked
from flower_ext.training.task import Task

log = getLogger("flwr")

_ACTIVATIONS: Mapping[Any, int] = {
    nn.Identity: PLAIN,
    **dict.fromkeys((nn.ReLU, torch.relu, functional.relu, "relu"), RELU),
    **dict.fromkeys((nn.Tanh, torch.tanh, functional.tanh, "tanh"), TANH),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, functional.sigmoid, "sigmoid"), SIGMOID),
}
_HOT = 2**18
"""Numbers of the models that are handed out together: few enough to be used from the caches."""
_NONE = np.zeros(0, np.float32)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One parameter: where it is among the numbers of its network."""

    start: int
    shape: torch.Size

    @property
    def where(self) -> slice:
        """Its numbers."""
        return slice(self.start, self.start + self.shape.numel())


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A dense layer: its module and name, and what follows it."""

    linear: nn.Linear
    name: str
    activation: int = PLAIN

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return f"{self.name}.weight"

    @property
    def bias(self) -> str:
        """Name of its bias, if it has one."""
        return f"{self.name}.bias"


class DenseNetwork:
    """A network of dense layers as one array of numbers and a table of its layers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers, self.parts = layers, dict[str, Part]()
        self.size = 0
        for layer in layers:
            for leaf, parameter in layer.linear.named_parameters():
                self.parts[f"{layer.name}.{leaf}"] = Part(start=self.size, shape=parameter.shape)
                self.size += parameter.numel()
        self.size = math.ceil(self.size / LINE) * LINE

    def takes(self, job: Job) -> bool:
        """Whether its numbers are of the usual kinds, and its targets classes."""
        features, targets = job.examples.features, job.examples.targets
        numbers = (features, *job.params.values())
        if not all(p.dtype == torch.float32 and p.is_cpu for p in numbers):
            return False
        if targets.dtype != torch.int64 or targets.dim() != 1 or not targets.is_cpu:
            return False
        classes = self.layers[-1].linear.out_features
        return bool(_kernels().are_classes(_in_line(targets), classes))

    def together(self, memory_limit: int) -> int:
        """How many models to hand out at a time, with what their training takes; at least one."""
        return max(1, min(_HOT, memory_limit // 16) // self.size)

    def minimise(self, jobs: Sequence[Job], trained: Callable[[str], bool]) -> Params:
        """What `local.train` makes of the trained parameters of each job, in rows.

        Raises
        ------
        ValueError
            ``trained`` selects nothing.
        """
        names = [name for name in self.parts if trained(name)]
        if not names:
            raise ValueError("trained selects no parameter of the model")
        rows = torch.empty(len(jobs), self.size)
        start, numbers, table = None, np.zeros(self.size, np.float32), self._table(names)
        descend, asked = _kernels().descend, [self._asked(job, names) for job in jobs]
        for job, weights, how in zip(jobs, rows.numpy(), asked, strict=True):
            if job.params is not start:  # often all begin alike
                start = job.params
                self._write(start, list(self.parts), numbers)
            weights[:] = numbers
            descend(weights, table, *how)
        parts = {name: self.parts[name] for name in names}
        return {n: rows[:, part.where].view(-1, *part.shape) for n, part in parts.items()}

    def _write(
        self, params: Mapping[str, Tensor], names: Sequence[str], numbers: np.ndarray
    ) -> None:
        for name in names:
            numbers[self.parts[name].where] = params[name].detach().numpy().ravel()

    def _asked(self, job: Job, names: Sequence[str]) -> tuple[Any, ...]:
        """What `compiled.descend` takes after the weights and the table."""
        pull, offset, terms = 0.0, _NONE, job.objective
        if terms:
            offset, vector = np.zeros((2, self.size), np.float32)
            for slope, scale, direction in affine(terms):
                pull += slope
                self._write(direction, names, vector)
                offset += np.float32(scale) * vector
        training, count = job.training, len(job.examples)
        steps = job.num_steps
        epochs = math.ceil(steps / math.ceil(count / training.batch_size))
        orders = [torch.randperm(count, generator=job.generator).numpy() for _ in range(epochs)]
        return (
            _in_line(job.examples.features).reshape(count, -1),
            _in_line(job.examples.targets),
            orders[0] if epochs == 1 else np.concatenate([np.zeros(0, np.int64), *orders]),
            training.batch_size,
            steps,
            float(training.learning_rate),
            float(training.momentum),
            float(training.sam_radius),
            pull,
            offset,
        )

    def _table(self, trained: Sequence[str]) -> np.ndarray:
        """The layers as `compiled` reads them."""
        return np.array(
            [
                (
                    layer.linear.in_features,
                    layer.linear.out_features,
                    self.parts[layer.weight].start,
                    self.parts[layer.bias].start if layer.bias in self.parts else -1,
                    layer.activation,
                    layer.weight in trained,
                    layer.bias in trained,
                )
                for layer in self.layers
            ],
            dtype=np.int64,
        )


def _in_line(values: Tensor) -> np.ndarray:
    """As compiled code wants them: for any other kind it would be compiled again."""
    return np.ascontiguousarray(values.detach().numpy())


def network(task: Task, job: Job) -> DenseNetwork | None:
    """The network that jobs like this one train, if compiled code can: cross-entropy, on x86."""
    if task.loss is not functional.cross_entropy or task.torch_device().type != "cpu":
        return None
    found = _network(task.model, job.examples.features.shape[1:], sizes(job.params))
    return found if found is not None and _kernels() is not None else None


@lru_cache(maxsize=1)
def _kernels() -> Any:
    """The module `compiled`, where it runs and is faster than the BLAS library; else None."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return None
    try:
        from flower_ext.training import compiled
    except ImportError:
        log.info("dense networks would train faster with Numba: pip install 'flower_ext[fast]'")
        return None
    except RuntimeError as error:  # no folder that Numba could write its cache to
        log.warning("dense networks would train faster if Numba could be used: %s", error)
        return None
    log.info("dense networks train as compiled code, which is made once on a machine: some seconds")
    return compiled


@lru_cache(maxsize=64)
def _network(
    build: Callable[[], nn.Module], shape: torch.Size, parameters: Sizes
) -> DenseNetwork | None:
    """That of a model which is a chain of dense layers, for examples and parameters like these."""
    model = build().train()
    if hooked(model):
        return None
    layers = _chain(model, flat=len(shape) == 1)
    widths = [shape.numel(), *(layer.linear.out_features for layer in layers)]
    if not layers or widths[:-1] != [layer.linear.in_features for layer in layers]:
        return None
    found = DenseNetwork(layers)
    # Each layer is used once, and all its parameters are its own.
    own = {name for name, _ in model.named_parameters()}
    used_once = len({layer.name for layer in layers}) == len(layers) and own == set(found.parts)
    alike = dict(parameters) == {name: part.shape for name, part in found.parts.items()}
    return found if used_once and alike else None


def _chain(model: nn.Module, *, flat: bool) -> list[Layer]:
    """Its layers in order; none if there is anything else than `nn.Flatten` before them."""
    try:
        nodes = list(fx.Tracer().trace(model).nodes)
    except Exception:  # whatever a forward method makes of a symbol
        return []
    layers: list[Layer] = []
    for before, node in pairwise(nodes):
        if node.all_input_nodes != [before] or len(node.args) != 1:
            return []
        if set(node.kwargs) - {"inplace"}:
            return []
        module = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        follows = _ACTIVATIONS.get(node.target if module is None else type(module))
        if type(module) is nn.Linear and flat:
            layers.append(Layer(linear=module, name=str(node.target)))
        elif follows is not None and layers and layers[-1].activation == PLAIN:
            layers[-1] = replace(layers[-1], activation=follows)
        elif isinstance(module, nn.Flatten) and not layers:
            flat = (module.start_dim, module.end_dim) == (1, -1)
        elif node.op != "output":
            return []
    return layers
