"""Secure sum, modulo 2^32 or 2^64, over the members of one round; members may drop out.

Source: Bonawitz et al. 2017, on the graph of Bell et al. 2020, against a semi-honest server.

1. Every member sends two fresh public keys (`Member.advertise`).
2. It shares two secrets among its neighbours: the seed of its own mask, and its mask key
   (`Member.share`).
3. It sends its vector under its own mask and under one mask for each neighbour (`Member.mask`).
4. It reveals one share for each neighbour (`Member.unmask`): of the neighbour's seed if the
   neighbour answered, or of its mask key if the neighbour was lost. `SumServer.total` then removes
   the masks.

The server learns the sum and which members took part. ``docs/proved/secure-sums.md`` describes the
adversaries. This package needs NumPy and ``cryptography``, and no optional dependency.
"""

from flower_ext.secure.aggregation.aggregation_messages import (
    Advert,
    Delivery,
    Keys,
    MaskedInput,
    Revealed,
    SealedShares,
    UnmaskRequest,
)
from flower_ext.secure.aggregation.aggregation_server import SumServer
from flower_ext.secure.aggregation.context import (
    Invitation,
    RoundContext,
    degree,
    graph_digest,
    graph_of,
)
from flower_ext.secure.aggregation.identities import Identities
from flower_ext.secure.aggregation.member import Member

__all__ = [
    "Advert",
    "Delivery",
    "Identities",
    "Invitation",
    "Keys",
    "MaskedInput",
    "Member",
    "Revealed",
    "RoundContext",
    "SealedShares",
    "SumServer",
    "UnmaskRequest",
    "degree",
    "graph_digest",
    "graph_of",
]
