"""Forward passes without random parts, whose results can be compared bit by bit."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_DROPPING = {
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout),
}


class deterministic(TorchFunctionMode):
    """Switch off a model's random parts, such as dropout, so that it does the same twice."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function without its random part."""
        kwargs = kwargs or {}
        if func in _DROPPING:
            return args[0] if args else kwargs["input"]
        if func is functional.rrelu:
            return functional.leaky_relu(args[0], 0.2)
        if func is functional.scaled_dot_product_attention:
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        return func(*args, **kwargs)
