"""Sums over parties in which no contribution can be read. Uses neither torch nor Flower.

`aggregation` computes the secure sum of one training round; `weighting` is the protocol of Uldp-FL,
which needs the extra of that name. The other modules serve both: labelled keys, masks of pairs,
fixed-point numbers, stored states, threads.
"""

from flower_ext.errors import IncompleteRound, ProtocolError

__all__ = ["IncompleteRound", "ProtocolError"]
