"""Kinds of layers, and how a model with each of them trains: alone, in a batch, and by DP-SGD.

    python -m tests.support.layer_kinds docs/layers.md

Every cell is measured. A model with the layer is compared with a plain loop of PyTorch, trained
among other clients, and compared example by example with PyTorch's own gradients.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from flower_ext.data import ClientData, Examples
from flower_ext.runs.page import table
from flower_ext.training import ClippedGradient, Job, LocalTraining, Params, Task, train
from flower_ext.training.batched.many import train_groups
from flower_ext.training.isolation import draws_seed, seeded
from flower_ext.training.models.dropout import own_dropout

WORDS, CLASSES, CLIENTS = 11, 3, 8
ALIKE = 1e-4
"""Largest relative difference that rounding, and the margin of DP-SGD's clipping, may cause."""


class Under(nn.Module):
    """A body, and a head above everything that the body returns for an example."""

    def __init__(self, body: nn.Module, like: Tensor) -> None:
        super().__init__()
        self.body = body
        with torch.no_grad():
            self.head = nn.Linear(self._of_body(like).shape[1], CLASSES)

    def _of_body(self, x: Tensor) -> Tensor:
        out = self.body(x)
        one: Tensor = out[0] if isinstance(out, tuple) else out
        return one.flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self._of_body(x)))
        return out


class Pairs(nn.Module):
    """A layer applied to every example and its reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x.flip(1))
        return out


class Bag(nn.Module):
    """A layer that adds up the words of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.EmbeddingBag(WORDS, 4, mode="sum")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Tied(nn.Module):
    """A model whose head shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)
        self.out.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.layer(x)).mean(dim=1))
        return out


class Attentive(nn.Module):
    """Self-attention over words."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x, x, need_weights=False)[0]
        return out


class Stepwise(nn.Module):
    """A recurrent cell along a sequence."""

    def __init__(self, kind: type[nn.GRUCell] | type[nn.LSTMCell]) -> None:
        super().__init__()
        self.layer = kind(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for one in x.unbind(1):
            state = self.layer(one, state)
        last: Tensor = state[0] if isinstance(state, tuple) else state
        return last


class Placed(nn.Module):
    """A parameter of the model itself, outside all layers: an addend for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places


class Scaled(nn.Module):
    """A parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Experts(nn.Module):
    """A model that sends each example to one of three experts; the last one gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            mine = (chosen == number).nonzero().squeeze(1)
            if len(mine):
                out = out.index_add(0, mine, expert(x[mine]))
        return out


class Waves(nn.Module):
    """A model with complex numbers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


@dataclass(frozen=True)
class Kind:
    """One row of the table.

    Parameters
    ----------
    body : Callable[[], nn.Module]
        Builds the module with the layer.
    shape : tuple of int
        Shape of an example; of its words, if ``words`` is true.
    whole : bool
        ``body`` is the whole model.
    """

    body: Callable[[], nn.Module]
    shape: tuple[int, ...]
    words: bool = False
    whole: bool = False
    model_type: torch.dtype = torch.float32
    features_type: torch.dtype = torch.float32

    def features(self, count: int, seed: int) -> Tensor:
        """Draw examples."""
        draw = torch.Generator().manual_seed(seed)
        if self.words:
            return torch.randint(WORDS, (count, *self.shape), generator=draw)
        return torch.randn(count, *self.shape, generator=draw).to(self.features_type)

    def build(self) -> nn.Module:
        """Return a model."""
        like = self.features(2, 0)
        model = self.body() if self.whole else Under(self.body(), like.to(self._inner(like)))
        return model.to(self.model_type) if self.model_type != torch.float32 else model

    def _inner(self, like: Tensor) -> torch.dtype:
        return torch.float32 if like.is_floating_point() else like.dtype

    def examples(self, count: int, seed: int) -> Examples:
        """Draw examples with their classes."""
        draw = torch.Generator().manual_seed(seed + 1)
        return Examples(
            self.features(count, seed), torch.randint(CLASSES, (count,), generator=draw)
        )


def _words(*settings: int, **more: object) -> Callable[[], nn.Module]:
    return partial(nn.Embedding, WORDS, 4, *settings, **more)  # type: ignore[arg-type]


KINDS: Mapping[str, Kind] = {
    "Linear": Kind(partial(nn.Linear, 4, 5), (4,)),
    "Linear over sequences": Kind(partial(nn.Linear, 4, 5), (6, 4)),
    "Bilinear": Kind(Pairs, (4,)),
    "Conv1d": Kind(partial(nn.Conv1d, 4, 6, 3), (4, 8)),
    "Conv2d": Kind(partial(nn.Conv2d, 4, 6, 3), (4, 6, 6)),
    "Conv3d": Kind(partial(nn.Conv3d, 2, 4, 2), (2, 4, 4, 4)),
    "Conv2d with groups": Kind(partial(nn.Conv2d, 4, 6, 3, groups=2), (4, 6, 6)),
    "ConvTranspose2d": Kind(partial(nn.ConvTranspose2d, 4, 2, 2), (4, 3, 3)),
    "Embedding": Kind(_words(), (6,), words=True),
    "Embedding with padding_idx": Kind(_words(padding_idx=0), (6,), words=True),
    "EmbeddingBag": Kind(Bag, (6,), words=True),
    "Embedding tied to a Linear": Kind(Tied, (6,), words=True, whole=True),
    "Embedding with max_norm": Kind(_words(max_norm=1.0), (6,), words=True),
    "Embedding with sparse=True": Kind(_words(sparse=True), (6,), words=True),
    "LayerNorm": Kind(partial(nn.LayerNorm, 4), (6, 4)),
    "GroupNorm": Kind(partial(nn.GroupNorm, 2, 4), (4, 6, 6)),
    "GroupNorm over features": Kind(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6)), (4,)
    ),
    "InstanceNorm": Kind(partial(nn.InstanceNorm2d, 4, affine=True), (4, 6, 6)),
    "RMSNorm": Kind(partial(nn.RMSNorm, 4), (6, 4)),
    "BatchNorm": Kind(partial(nn.BatchNorm1d, 4), (4,)),
    "PReLU": Kind(partial(nn.PReLU, 4), (4,)),
    "MultiheadAttention": Kind(Attentive, (6, 4)),
    "TransformerEncoderLayer": Kind(
        partial(nn.TransformerEncoderLayer, 4, 2, 8, dropout=0.0, batch_first=True), (6, 4)
    ),
    "GRU": Kind(partial(nn.GRU, 4, 5, batch_first=True), (6, 4)),
    "LSTM": Kind(partial(nn.LSTM, 4, 5, batch_first=True), (6, 4)),
    "GRUCell": Kind(partial(Stepwise, nn.GRUCell), (6, 4)),
    "LSTMCell": Kind(partial(Stepwise, nn.LSTMCell), (6, 4)),
    "Dropout": Kind(lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)), (4,)),
    "a parameter in no layer": Kind(Placed, (6, 4)),
    "a parameter of one number": Kind(Scaled, (4,)),
    "experts, of which each example takes one": Kind(Experts, (4,)),
    "weight_norm": Kind(lambda: parametrizations.weight_norm(nn.Linear(4, 5)), (4,)),
    "spectral_norm": Kind(lambda: parametrizations.spectral_norm(nn.Linear(4, 5)), (4,)),
    "a model of bfloat16": Kind(
        partial(nn.Linear, 4, 5), (4,), model_type=torch.bfloat16, features_type=torch.bfloat16
    ),
    "features of float64, a model of float32": Kind(
        partial(nn.Linear, 4, 5), (4,), features_type=torch.float64
    ),
    "complex parameters": Kind(Waves, (4,)),
}


@dataclass(frozen=True)
class Cell:
    """One result: the largest difference from PyTorch, relative to the model's largest move.

    ``how`` names the way in which the model trained, or the reason why it was refused.
    """

    how: str
    off: float = 0.0
    refused: bool = False


TRAINING = LocalTraining(epochs=2, batch_size=4, learning_rate=0.2)


def task_of(kind: Kind) -> Task:
    """Return a task without data."""

    def no_data(partition: int) -> ClientData:
        raise LookupError(partition)

    return Task(model=kind.build, data=no_data, device="cpu")


def trained(kind: Kind) -> Cell:
    """Compare the training of one client's model with a plain PyTorch loop."""
    task, data = task_of(kind), kind.examples(10, 5)
    try:
        start = task.initial_params(1)
        draw = torch.Generator().manual_seed(7)
        ours = train(task, Job(params=start, examples=data, training=TRAINING, generator=draw))
    except ValueError as error:
        return Cell(str(error), refused=True)
    theirs = by_pytorch(kind, start, data, torch.Generator().manual_seed(7))
    return Cell("equal", _off(ours, theirs, start))


def by_pytorch(kind: Kind, start: Params, data: Examples, draw: torch.Generator) -> Params:
    """Train in a plain PyTorch loop, with this package's dropout masks."""
    model = own_dropout(kind.build())
    model.load_state_dict(start, strict=False)  # tied parameters travel once
    model.train()
    with seeded(draws_seed(draw), torch.device("cpu")):
        steps = torch.optim.SGD(model.parameters(), TRAINING.learning_rate)
        for _ in range(TRAINING.epochs):
            for rows in torch.split(torch.randperm(len(data), generator=draw), TRAINING.batch_size):
                steps.zero_grad()
                outputs = model(data.features[rows])
                nn.functional.cross_entropy(outputs, data.targets[rows]).backward()  # type: ignore[no-untyped-call]
                steps.step()
    return {name: p.detach() for name, p in model.state_dict().items()}


def in_a_batch(kind: Kind) -> Cell:
    """Compare several clients' models, trained at once, with plain PyTorch loops."""
    task = task_of(kind)
    try:
        starts = [task.initial_params(client) for client in range(CLIENTS)]
        jobs = [
            Job(
                params=start,
                examples=kind.examples(10, client),
                training=TRAINING,
                generator=torch.Generator().manual_seed(client),
            )
            for client, start in enumerate(starts)
        ]
        found = [*train_groups(task, jobs)]
    except ValueError as error:
        return Cell(str(error), refused=True)
    off = 0.0
    for group, rows in found:
        for place, client in enumerate(group):
            draw = torch.Generator().manual_seed(client)
            theirs = by_pytorch(kind, starts[client], jobs[client].examples, draw)
            params = {name: part[place] for name, part in rows.items()}
            off = max(off, _off(params, theirs, starts[client]))
    together = max(len(group) for group, _ in found) > 1
    return Cell("equal" if together else "equal, one by one", off)


def by_dp_sgd(kind: Kind) -> Cell:
    """Compare the sum of clipped gradients with PyTorch's own gradient of each example."""
    task, data = task_of(kind), kind.examples(9, 3)
    try:
        start = task.initial_params(1)
        names = [name for name, _ in kind.build().named_parameters()]
        gradient = ClippedGradient(task, names, clipping_norm=0.3)
        gradient(start, data.features, data.targets)
        torch.manual_seed(0)
        ours = gradient(start, data.features, data.targets)
    except ValueError as error:
        return Cell(str(error), refused=True)
    theirs = clipped_by_pytorch(kind, start, data, names, width=gradient.passes.width(gradient.way))
    return Cell(f"equal, {gradient.way}", _off(ours, theirs, {}))


def clipped_by_pytorch(
    kind: Kind, start: Params, data: Examples, names: list[str], *, width: int
) -> Params:
    """Clip each example's gradient from its own pass; with dropout, from its row of one pass.

    Copies of the first example fill that pass up to its ``width``, as in `ClippedGradient`.
    """
    draws = any(isinstance(module, nn.Dropout) for module in kind.build().modules())
    summed = {name: torch.zeros_like(start[name], dtype=torch.float64) for name in names}
    for row in range(len(data)):
        model = kind.build()
        model.load_state_dict(start, strict=False)
        model.train()
        torch.manual_seed(0)
        rows = data.features[row : row + 1]
        if draws:
            torch.manual_seed(int(torch.randint(2**62, ())))
            copies = data.features[:1].expand(width - len(data), *data.features.shape[1:])
            rows = torch.cat([data.features, copies])
        outputs = model(rows)[row if draws else 0].unsqueeze(0)
        nn.functional.cross_entropy(outputs, data.targets[row : row + 1]).backward()  # type: ignore[no-untyped-call]
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        slopes = {name: part.to_dense().double() for name, part in found.items()}
        norm = math.sqrt(sum(float(part.square().sum()) for part in slopes.values()))
        for name, part in slopes.items():
            summed[name] += part * min(1.0, 0.3 / norm)
    return summed


def _off(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], start: Params) -> float:
    """Return the largest difference between the two, relative to the largest move."""
    parts = [
        (ours[name], theirs[name], start.get(name, torch.zeros_like(theirs[name]))) for name in ours
    ]
    moved = max(float((other - begin).abs().max()) for _, other, begin in parts)
    return max(float((one - other).abs().max()) for one, other, _ in parts) / moved


WAYS: Mapping[str, Callable[[Kind], Cell]] = {
    "trained": trained,
    "in a batch of clients": in_a_batch,
    "DP-SGD": by_dp_sgd,
}


def found() -> Mapping[str, Mapping[str, Cell]]:
    """Run every cell; return results by layer and way."""
    cells: dict[str, dict[str, Cell]] = {}
    for name, kind in KINDS.items():
        cells[name] = {way: find(kind) for way, find in WAYS.items()}
    return cells


def page(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """Return the documentation page."""
    refusals: list[str] = []

    def cell_text(cell: Cell) -> str:
        if not cell.refused:
            assert cell.off <= ALIKE, cell
            return cell.how
        if cell.how not in refusals:
            refusals.append(cell.how)
        return f"refused ({refusals.index(cell.how) + 1})"

    alike: dict[tuple[str, ...], list[str]] = {}
    for name, of_kind in cells.items():
        alike.setdefault(tuple(cell_text(cell) for cell in of_kind.values()), []).append(name)
    rows = [("; ".join(names), *texts) for texts, names in alike.items()]
    notes = [f"{number}. {text}" for number, text in enumerate(refusals, start=1)]
    return "\n\n".join([INTRODUCTION, table(("layers", *WAYS), rows), "\n".join(notes)]) + "\n"


INTRODUCTION = """# Layers of your own model

The columns are for a client that trains alone, for a batch of clients, and for DP-SGD. The cells
say how a model with such layers trains (`python -m tests.support.layer_kinds docs/layers.md`
measures them):

* *equal*: the trained model equals that of a plain loop of PyTorch, up to rounding. For DP-SGD, the
  sum of clipped gradients equals the sum over single examples.
* *one by one*: clients or examples train one after another, which takes longer.
* *in one pass*, *by vmap*: DP-SGD computes the gradients of all examples of a mini-batch together,
  by formulas for these layers or by `torch.func.vmap`.
* *refused (1)*: the package refuses such a model with the error below the table."""


def main() -> None:
    """Write the page to the file named on the command line, or print it."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")  # PyTorch's warnings about speed
    text = page(found())
    if len(sys.argv) == 2:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
