"""Secure sum, modulo 2^32 or 2^64, over the members of one round; members may drop out.

Source: Bonawitz et al. 2017, on the graph of Bell et al. 2020, against a semi-honest server.

1. Every member sends two fresh public keys (`Member.advertise`).
2. It splits two secrets into shares, one for each neighbour (`Member.share`). The first secret is
   the seed of a mask that only this member knows. The second is its mask key: the private key from
   which it computes the masks that it has in common with its neighbours.
3. It sends its vector under all these masks (`Member.mask`). Of two neighbours, one adds their
   common mask, and the other subtracts it. In the sum, the mask cancels.
4. For each neighbour, it reveals one share (`Member.unmask`): a share of the neighbour's seed if
   the neighbour's vector arrived, and a share of the neighbour's mask key if the neighbour was
   lost. `SumServer.total` rebuilds these secrets, and removes the masks that did not cancel.

The server learns the sum and which members took part. ``docs/proved/secure-sums.md`` describes the
adversaries. This package needs NumPy and ``cryptography``, and no optional dependency.
"""
