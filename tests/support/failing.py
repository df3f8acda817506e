"""A client whose data make its training fail, each in another way."""

import math

import torch
from torch.nn import functional

from flower_ext.data import ClientData, Examples
from flower_ext.training import Task
from tests.support.worlds import Net, client_data

TOO_LARGE, ENDING = -7, -8
"""Labels for which the loss finds too little memory, and for which it ends its process."""
FAILING = 0
"""Partition of the client."""


def _nan(data):
    data.train.features[3, 1] = math.nan


def _label(data):
    data.train.targets[3] = 99


def _memory(data):
    data.train.targets[3] = TOO_LARGE


def _ending(data):
    data.train.targets[3] = ENDING


def _unusual(data):
    features = torch.quantize_per_tensor(data.train.features, 0.1, 0, torch.qint8)
    test = Examples(data.test.features.to_sparse(), data.test.targets)
    return ClientData(train=Examples(features, data.train.targets), test=test)


def _raises(data):
    raise OSError("a record cannot be read")


def _nothing(data):
    return {}


KINDS = {
    "a NaN": _nan,
    "a label out of range": _label,
    "too little memory": _memory,
    "an end of the process": _ending,
    "tensors of an unusual kind": _unusual,
    "data that raise": _raises,
    "data of another type": _nothing,
}


def _loss(outputs, targets):
    """Return the loss, or raise as a record's target asks for."""
    if bool((targets == TOO_LARGE).any()):
        raise MemoryError("too little memory for this record")
    if bool((targets == ENDING).any()):
        raise SystemExit
    return functional.cross_entropy(outputs, targets)


def failing_task(
    kind: str | None, *, model=Net, beginning: int = 0, sound_data=client_data
) -> Task:
    """Return the tests' task, in which client `FAILING` fails as ``kind`` says, if it does.

    Its data are sound when they are loaded for the first ``beginning`` times. ``sound_data``
    returns new data of a client at each call.
    """
    loaded = 0

    def data(partition):
        nonlocal loaded
        client_examples = sound_data(partition)
        if kind is None or partition != FAILING:
            return client_examples
        loaded += 1
        return client_examples if loaded <= beginning else _spoiled(client_examples, kind)

    return Task(model=model, data=data, loss=_loss, metrics={}, device="cpu")


def _spoiled(data, kind):
    other = KINDS[kind](data)
    return data if other is None else other
