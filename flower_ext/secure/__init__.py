"""Sums over parties in which no contribution can be read. Uses neither torch nor Flower.

`aggregation` computes the secure sum of one training round; `weighting` is the protocol of Uldp-FL.
The other modules serve both: labelled keys, masks of pairs, fixed-point numbers, threads.

This module also exports the parties of `weighting`. It imports them at first use, because
`weighting` needs the extra of that name and `aggregation` does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flower_ext.errors import IncompleteRound, ProtocolError

if TYPE_CHECKING:
    from flower_ext.secure.weighting.agreement import WeightingSettings
    from flower_ext.secure.weighting.estimate import RoundEstimate, estimate_round
    from flower_ext.secure.weighting.weighting_server import WeightingServer
    from flower_ext.secure.weighting.weighting_silo import WeightingSilo

__all__ = [
    "IncompleteRound",
    "ProtocolError",
    "RoundEstimate",
    "WeightingServer",
    "WeightingSettings",
    "WeightingSilo",
    "estimate_round",
]

_MODULES = {
    "RoundEstimate": "estimate",
    "WeightingServer": "weighting_server",
    "WeightingSettings": "agreement",
    "WeightingSilo": "weighting_silo",
    "estimate_round": "estimate",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.weighting.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
