"""Sums over several parties, computed so that each party's contribution stays hidden.

`aggregation` computes the secure sum of one training round. `weighting` is the protocol of Uldp-FL
and needs the extra ``weighting``. The other modules provide what both use: messages, derived keys,
masks that cancel between two parties, and threads. No module uses torch or Flower.
"""

from flower_ext.errors import IncompleteRound, ProtocolError

__all__ = ["IncompleteRound", "ProtocolError"]
