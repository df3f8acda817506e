"""Checks for layers that must not be shared, because their running statistics reveal data."""

import logging
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flower_ext.errors import InvalidValue
from flower_ext.training.models.factory import is_frozen
from flower_ext.training.params import matches

RUNNING_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Names of the buffers of batch normalisation layers, without the layer's name."""
_MOST_GROUPS, _CHANNELS_IN_A_GROUP = 32, 4
"""In a GroupNorm that replaces a BatchNorm of images: most groups, fewest channels in each."""


class UnshareableModel(InvalidValue):
    """Clients cannot share a part of the model, such as a layer with statistics of the data."""


def opacus() -> Any:
    """Import Opacus with its validators on first use, because that takes over a second."""
    silent = logging.NullHandler()
    logging.getLogger().addHandler(silent)  # keeps Opacus from configuring the root logger
    try:
        import opacus.validators
    finally:
        logging.getLogger().removeHandler(silent)
    return opacus


def objections(layer: nn.Module) -> str:
    """Return why Opacus refuses a layer under DP-SGD, and its advice; "" if Opacus accepts it."""
    validate = opacus().validators.ModuleValidator.VALIDATORS.get(type(layer), lambda layer: ())
    return " ".join(map(str, validate(layer)))


def check_shareable(model: nn.Module, personal: Sequence[str] = ()) -> None:
    """Refuse a model if a shared layer is BatchNorm, or has other buffers that nodes send.

    ``personal`` names the layers that clients keep for themselves. All others are shared. Frozen
    layers are accepted.

    Raises
    ------
    UnshareableModel
        The message names the layer and the remedy.
    """
    for name, module in model.named_modules():
        if matches(name, personal) or is_frozen(module):
            continue
        constant = module._non_persistent_buffers_set
        buffers = [name for name, _ in module.named_buffers(recurse=False) if name not in constant]
        if isinstance(module, _BatchNorm):
            raise UnshareableModel(
                f"layer {name!r} ({type(module).__name__}) keeps running statistics of the data, "
                "which neither clipping nor noise covers. Use GroupNorm instead "
                "(flower_ext.training.replace_batch_norm), or make the layer personal: "
                f"personal=(..., {name!r})."
            )
        if buffers:
            raise UnshareableModel(
                f"layer {name!r} ({type(module).__name__}) has buffers {buffers}, which would "
                "leave the client without noise. If they are constant, compute them in the "
                "forward pass, or freeze the layer's parameters (requires_grad=False). Otherwise "
                f"make the layer personal: personal=(..., {name!r}). {objections(module)}".rstrip()
            )


def replace_batch_norm(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` with GroupNorm in place of every BatchNorm.

    Each group has several channels: with one channel in a group, an average over the normalised
    image would be the same for every example. Features that are not images form one group, as in
    LayerNorm. A new layer keeps the name, weight, bias, ``eps``, device, type and mode of the old
    one, but not its statistics, so a pretrained model must be trained again.

    Raises
    ------
    InvalidValue
        A layer has too few channels to normalise within an example; the message names it.
    """
    copy = deepcopy(model)
    fixed = {
        layer: _group_norm(name, layer)
        for name, layer in copy.named_modules()
        if isinstance(layer, _BatchNorm)
    }
    if isinstance(copy, _BatchNorm):
        return fixed[copy]
    for module in copy.modules():
        for leaf, child in module._modules.items():  # a shared layer is here under each name
            if isinstance(child, _BatchNorm):
                module._modules[leaf] = fixed[child]
    return copy


def _group_norm(name: str, layer: _BatchNorm) -> nn.GroupNorm:
    channels = layer.num_features
    of_images = isinstance(layer, nn.BatchNorm2d | nn.BatchNorm3d)
    # Features that are not images form one group. Normalising a group of two keeps only the sign of
    # their difference, and a group of one keeps nothing.
    fewest = 2 if of_images else 3
    if channels < fewest:
        raise InvalidValue(
            f"layer {name!r} ({type(layer).__name__}) has num_features={channels}: expected at "
            f"least {fewest} to normalise within an example; leave the layer out, or widen it"
        )
    most = min(_MOST_GROUPS, channels // _CHANNELS_IN_A_GROUP) if of_images else 1
    groups = next(number for number in range(max(1, most), 0, -1) if channels % number == 0)
    norm = nn.GroupNorm(groups, channels, eps=layer.eps, affine=False)
    norm.affine, norm.weight, norm.bias = layer.affine, layer.weight, layer.bias
    return norm.train(layer.training)
