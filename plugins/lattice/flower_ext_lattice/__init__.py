"""Private weighting for large models, over ring-LWE. Experimental: no outsider has reviewed it.

User u has n_su records in silo s, and N_u in all silos. Silo s computes the user's update Δ_su. The
server learns Σ_s (Σ_u (n_su / N_u) Δ_su + z_s), where z_s is the silo's noise, and nothing else
about the records. Silos learn nothing about one another. This package defines the protocol, for a
case that Kato et al., "Uldp-FL" (PVLDB 2024), leave open: models of a million parameters. Protocol
1 of that paper, over Paillier, is in `flower_ext.secure.weighting` and remains the default. This
package is a plug-in: an entry point of the group ``flower_ext.weighting`` registers
`LatticeWeighting` as protocol ``lattice``.

Protocol 1 inverts blinded totals, so a plaintext must hold lcm(1, …, N_max). In this protocol the
silos look the inverse up in a table instead. They share a secret shift ρ_u for each user. The
server learns only x_u = N_u + ρ_u modulo M. The server offers encryptions of ⌊2^k / j⌋ for all j,
rotated by x_u. The silos can open only the encryption at position ρ_u, where j is N_u. The
specification is ``docs/proved/lattice.md``.

=========================  ================================================================
specification              here
=========================  ================================================================
R_q, n, k, b               `ring`; `DEGREE`, `WEIGHT_BITS`, `FRACTION_BITS` in `settings`
M, N_max, C                ``table_size``, ``max_records_per_user``, ``clipping_norm``
n_su, N_u, ρ_u, x_u        ``counts``, their sum over silos, ``shifts``, ``shifted``
s, (pk0, pk1), a_u, b_u    `keys`, `weights`
K_{u,i}                    keys of the oblivious transfer, `oblivious.Sender.keys`
V_su, r, e2, D_s, z_s      `encrypted_sum`; z_s is ``noise``
second key per entry       `columns`: ``draw_choices`` is P, ``winning_choices`` / P the rate
=========================  ================================================================

The set-up and the rounds have the steps of `flower_ext.secure.weighting.agreement`. Silo 0 adds the
silos' choices ρ_u of the oblivious transfer to its masked counts. An epoch lasts until different
users are drawn, and has one set of weights. If all users take part in every round, the server sends
the same weights again, and a silo accepts them if they are the same to the last bit.

A silo never needs to hold all users' updates at once.

The transport must be confidential and authenticated between each silo and the server. Otherwise an
eavesdropper who listens to one silo, and colludes with all other silos, learns this silo's record
counts.

`LatticeServer` and `LatticeSilo` are the parties. They use neither torch nor Flower;
`flower_ext.federation.sums.weighted` runs them over Flower.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flower_ext_lattice.weighting import LatticeWeighting

__all__ = ["LatticeWeighting"]


def __getattr__(name: str) -> Any:
    """Import the settings at first use, so that the parties load neither torch nor Flower."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flower_ext_lattice.weighting import LatticeWeighting

    return LatticeWeighting
