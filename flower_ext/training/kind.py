"""The kind of a training: its model, loss and shapes, without its data."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flower_ext.data import ClientData, trees
from flower_ext.data.trees import Tree
from flower_ext.training.params import Sizes, sizes
from flower_ext.training.task import Task


@dataclass(frozen=True)
class TrainingKind:
    """Everything on which a trial's result depends; the key under which results are stored.

    ``features`` and ``targets`` are one example of zeros, with the shapes and types of real ones:
    no result depends on values of the data.
    """

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    device: torch.device
    sizes: Sizes
    row_types: Hashable
    features: Tree = field(compare=False)
    targets: Tree = field(compare=False)

    @property
    def task(self) -> Task:
        """A task without data."""
        return Task(model=self.model, data=_no_data, loss=self.loss, device=str(self.device))


def kind_of(
    task: Task, features: Tree, targets: Tree, params: Mapping[str, Tensor]
) -> TrainingKind:
    """Return the kind of a training that starts at ``params``, on examples like the given ones."""
    row_types = trees.row_type(features), trees.row_type(targets)
    device, parts = task.torch_device(), (trees.zeros(features, 1), trees.zeros(targets, 1))
    return TrainingKind(task.model, task.loss, device, sizes(params), row_types, *parts)


def _no_data(client: int) -> ClientData:
    raise NotImplementedError
