"""FedBN: every client keeps its own normalisation layers and shares all others.

Source: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization" (ICLR 2021), Algorithm 1.

====================  =====================================================
paper                 here
====================  =====================================================
w_k of other layers   the shared model (``arrays``)
w_k of BN layers      the client's memory: weight, bias and running statistics
E                     ``local.epochs`` (or ``steps``)
====================  =====================================================

The method is `FedPer` with the normalisation layers as the personal part. Neither clipping nor
noise covers running statistics, so they stay on the client with their layer. If ``personal`` misses
a layer with running statistics, the run ends before its first round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from flower_ext.algorithms.fedper import FedPer
from flower_ext.errors import InvalidValue
from flower_ext.training.models.factory import is_frozen

NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Layers of batch, instance, group, layer and root-mean-square normalisation."""


@dataclass(frozen=True, kw_only=True)
class FedBN(FedPer):
    """Federated averaging with local normalisation layers.

    The method suits clients whose features differ, such as images from different cameras. It
    accepts the same plans as `FedPer`, and weights clients in the mean as `FedPer` does.

    Parameters
    ----------
    personal : Sequence[str]
        Names of the normalisation layers; ``*`` matches any part of a name. `for_model` finds the
        names in a model.
    **options
        Fields of `FedPer`.
    """

    personal: Sequence[str] = ("*bn*",)

    @classmethod
    def for_model(cls, model: nn.Module, **options: Any) -> Self:
        """Return the method for a model whose trainable normalisation layers are all personal.

        Parameters
        ----------
        model : nn.Module
            A model of the task, as in ``FedBN.for_model(task.model())``.
        **options
            Fields of `FedPer`, except ``personal``.

        Raises
        ------
        InvalidValue
            The model has no trainable normalisation layer.
        """
        layers = [
            name
            for name, module in model.named_modules()
            if isinstance(module, NORMALISATION) and module.state_dict() and not is_frozen(module)
        ]
        if not layers:
            raise InvalidValue(
                f"{cls.__name__} for a {type(model).__name__}: expected a model with trainable "
                "normalisation layers, such as BatchNorm or GroupNorm"
            )
        return cls(personal=layers, **options)
