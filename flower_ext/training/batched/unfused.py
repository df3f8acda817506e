"""Step-by-step forms of layers that `torch.vmap` cannot follow.

PyTorch computes a recurrent layer as one operation, which has no form for many models. Nor does
vmap know which row of each model's embedding is padding.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_ext.errors import InvalidValue

States = tuple[Tensor, ...]
"""States of a cell, the hidden state first; each (batch, hidden size)."""


def faster_alone(layer: nn.Module, device: torch.device) -> bool:
    """Return True if a recurrent layer in steps takes longer for many models than one by one."""
    if not isinstance(layer, nn.RNNBase) or device.type != "cpu":
        return False
    return layer.hidden_size > _MOST_NEURONS.get(type(layer), 0)


def unfuse(model: nn.Module) -> nn.Module:
    """Give recurrent layers and padded embeddings of ``model`` their form in steps; return it.

    Raises
    ------
    ValueError
        A layer of these kinds has settings that the form does not support.
    """
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            if type(layer) not in _CELLS or layer.proj_size or layer.dropout:
                raise InvalidValue(f"{layer} has no form in steps")
            layer.forward = partial(_recurrent, layer)
        elif isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
                raise InvalidValue(f"{layer} has no form in steps")
            layer.forward = partial(_embedding, layer)  # type: ignore[method-assign]
    return model


def _embedding(layer: nn.Embedding, x: Tensor) -> Tensor:
    """Return rows of the weight; padding contributes nothing to its gradient."""
    rows = functional.embedding(x, layer.weight)
    padding = torch.eq(x, layer.padding_idx)  # type: ignore[arg-type]
    return torch.where(padding.unsqueeze(-1), rows.detach(), rows)


def _recurrent(
    layer: nn.RNNBase, x: Tensor, start: Tensor | States | None = None
) -> tuple[Tensor, Tensor | States]:
    """Return outputs and last states, as ``layer`` computes them for a batch of sequences."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise TypeError("expected a batch of sequences of one length, as a tensor")
    cell, memories = _CELLS[type(layer)]
    x = x.transpose(0, 1) if layer.batch_first else x
    suffixes = ("", "_reverse") if layer.bidirectional else ("",)
    if start is None:
        shape = (len(suffixes) * layer.num_layers, x.shape[1], layer.hidden_size)
        start = (x.new_zeros(shape),) * memories
    starts = start if isinstance(start, tuple) else (start,)
    ends: list[States] = []
    for number in range(layer.num_layers):
        outputs = []
        for suffix in suffixes:
            name = f"l{number}{suffix}"
            states = tuple(state[len(ends)] for state in starts)
            inputs = _product(layer, "ih", name, x.flip(0) if suffix else x)  # of all steps
            hidden = []
            for one in inputs:
                states = cell(layer, one, _product(layer, "hh", name, states[0]), states)
                hidden.append(states[0])
            outputs.append(torch.stack(hidden[::-1] if suffix else hidden))
            ends.append(states)
        x = torch.cat(outputs, dim=-1)
    last = tuple(map(torch.stack, zip(*ends, strict=True)))
    return x.transpose(0, 1) if layer.batch_first else x, last if memories > 1 else last[0]


def _product(layer: nn.RNNBase, kind: str, name: str, x: Tensor) -> Tensor:
    weight, bias = (getattr(layer, f"{part}_{kind}_{name}", None) for part in ("weight", "bias"))
    assert weight is not None
    return functional.linear(x, weight, bias)


def _lstm(layer: nn.RNNBase, inputs: Tensor, recurrent: Tensor, states: States) -> States:
    entry, keep, new, out = (inputs + recurrent).chunk(4, dim=-1)
    memory = torch.sigmoid(keep) * states[1] + torch.sigmoid(entry) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(memory), memory


def _gru(layer: nn.RNNBase, inputs: Tensor, recurrent: Tensor, states: States) -> States:
    reset, keep, new = inputs.chunk(3, dim=-1)
    from_reset, from_keep, from_new = recurrent.chunk(3, dim=-1)
    new = torch.tanh(new + torch.sigmoid(reset + from_reset) * from_new)
    return (new + torch.sigmoid(keep + from_keep) * (states[0] - new),)


def _rnn(layer: nn.RNNBase, inputs: Tensor, recurrent: Tensor, states: States) -> States:
    activation = torch.tanh if layer.mode == "RNN_TANH" else torch.relu
    return (activation(inputs + recurrent),)


_CELLS = {nn.LSTM: (_lstm, 2), nn.GRU: (_gru, 1), nn.RNN: (_rnn, 1)}
"""One step of each kind of layer, and its number of states."""
_MOST_NEURONS = {nn.LSTM: 32, nn.GRU: 128, nn.RNN: 128}
"""Largest sizes for steps on a CPU; with more neurons models leave its caches at each step."""
