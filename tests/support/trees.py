"""One problem with examples as one tensor, a tuple or a mapping, and outputs as objects."""

from collections import OrderedDict
from dataclasses import dataclass, fields, replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples
from flower_ext.training import accuracy
from tests.support.jobs import problem

WORDS, CLASSES, LENGTH = 11, 3, 5


class Sentences(nn.Module):
    """A model of words with a mask: ``tokens`` and ``mask`` of shape (n, LENGTH)."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, tokens, mask):
        words = self.embedding(tokens) * mask.unsqueeze(-1)
        return self.head(torch.tanh(words.sum(dim=1)))


class Packed(Sentences):
    """The same model for examples in one tensor of shape (n, 2, LENGTH)."""

    def forward(self, x):
        return super().forward(x[:, 0], x[:, 1])


@dataclass
class Output(OrderedDict):
    """A stand-in for ModelOutput of transformers, which is not installed here.

    It is a dataclass whose fields are also items, unless they are None.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class WithOwnLoss(Sentences):
    """A model whose output has a loss if it gets labels, as in transformers."""

    def forward(self, tokens, mask, labels=None):
        logits = super().forward(tokens, mask)
        loss = None if labels is None else cross_entropy(logits, labels)
        return Output(loss=loss, logits=logits, hidden=(self.embedding(tokens),))


def packed(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (count, LENGTH), generator=draw)
    mask = torch.randint(2, (count, LENGTH), generator=draw)
    return Examples(
        torch.stack([tokens, mask], dim=1), torch.randint(CLASSES, (count,), generator=draw)
    )


def as_tuple(data):
    return Examples(data.features.unbind(1), data.targets)


def as_mapping(data):
    tokens, mask = data.features.unbind(1)
    return Examples({"mask": mask, "tokens": tokens}, data.targets)


def with_labels(data):
    return Examples({**as_mapping(data).features, "labels": data.targets}, data.targets)


def of_output(read):
    """Return the loss or metric of the ``logits`` of an output."""

    def found(outputs, targets):
        return read(outputs.logits, targets)

    return found


PACKED, PARTED = problem(Packed), problem(Sentences)
OWN_LOSS = replace(
    problem(WithOwnLoss, lambda outputs, targets: outputs.loss),
    metrics={"accuracy": of_output(accuracy)},
)
FORMS = {
    "tuple": (PARTED, as_tuple),
    "mapping": (PARTED, as_mapping),
    "mapping, and an output with its own loss": (OWN_LOSS, with_labels),
}
