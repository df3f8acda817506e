"""Sums over parties that hide each party's contribution. Uses neither torch nor Flower.

`aggregation` computes the secure sum of one training round. `weighting` is the protocol of Uldp-FL,
which needs the extra ``weighting``. Other modules serve both: messages, labelled keys, masks that
pairs of parties share, and threads.
"""

from flower_ext.errors import IncompleteRound, ProtocolError

__all__ = ["IncompleteRound", "ProtocolError"]
