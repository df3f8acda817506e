"""Protocols that weigh users by their records, privately, as the two ends speak them over Flower.

`protocol` says what both ends of any protocol do. `paillier` and `paillier_silo` are Protocol 1 of
the Uldp-FL paper. The parties themselves, without transport, are in `flower_ext.secure.weighting`.
"""
