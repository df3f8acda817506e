"""Protocols that weigh users by their records in private, as server and silos run them over Flower.

`protocol` defines both ends of any protocol. `paillier` and `paillier_silo` are Protocol 1 of the
Uldp-FL paper; `lattice` and `lattice_silo` are the protocol over ring-LWE. The parties, without
transport, are in `flower_ext.secure.weighting`.
"""
