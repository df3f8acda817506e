"""Protocols that weigh users by their records in private, as server and silos run them over Flower.

`protocol` defines both ends of any protocol, and `party_ends` what those over
`flower_ext.secure.weighting` have in common. `paillier_weighting` and `paillier_end` are Protocol 1
of the Uldp-FL paper. A plug-in adds a protocol by an entry point.
"""
