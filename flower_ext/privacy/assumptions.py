"""Sentences that several guarantees print about their assumptions."""

from __future__ import annotations

from flower_ext.privacy.noise import IMPROBABLE


def noise_assumption(secure: bool) -> str:
    """Return the assumption about noise: from a cryptographic generator, or from a seed."""
    if secure:
        return "noise from a cryptographic generator keyed by the operating system"
    return "SIMULATION: noise is reproducible from the seed, which clients are told"


ON_A_GRID = (
    "noise is rounded to a public grid with what it is added to, and the generator's Gaussian is "
    "exact to the grid's resolution"
)
"""What is assumed of Gaussian noise in floating point (see `privacy.noise`)."""
NOT_PROVIDED = "which this run does not provide"
"""Part of an assumption that nothing in the run sees to."""
NO_SECURE_SUM = f"secure aggregation, {NOT_PROVIDED}: the server sees no upload"
DISCRETE = (
    "noise is discrete Gaussian on a public grid, and sums of its shares are worth a continuous "
    "Gaussian: proven up to a factor of 1 + 1e-120 (privacy.discrete_gaussian)"
)
"""The statement about noise in secure sums, where no float is rounded after noise is added."""
SECURE_SUM = (
    "the server follows the protocol of secure aggregation, keys of its messages reach the clients "
    "unaltered, and X25519, HKDF-SHA256, ChaCha20 and ChaCha20-Poly1305 are secure"
)
NONE_OF_THEM = "the adversary is none of those who add noise: each could take its own share off"
WHOLE_UPLOADS = "uploads are of single precision or wider, in which they add up on the grid"
"""What is assumed where sums are protected by noise that their parts carry."""
OWN_GRADIENTS = (
    "the gradients that a step clips are each of one record alone: of records that pass a model "
    "together a trial with usual and with odd ones finds that, which is evidence and no proof"
)
"""What is assumed of DP-SGD on models whose layers do not show it."""
LOADS = "no single record keeps a client from loading its data (Task.data)"
"""The assumption where one record must not show in whether its client answers."""
TELLS = (
    "the server's log and all of the run directory but the model tell it (metrics.jsonl, "
    "missing.jsonl, ledger.jsonl, guarantee.json, clients.csv, use.json, checkpoints, report and "
    "figures) and stay with the server"
)
HIDDEN_DRAW = (
    "neither who was drawn nor how many is known to the adversary: who is asked learns how many, "
    f"and {TELLS}"
)
NOISE_OF_OTHERS = (
    WHOLE_UPLOADS,
    NONE_OF_THEM,
    f"no honest upload is refused for its norm: each is with probability {IMPROBABLE:g} at most, "
    "which δ does not count",
)
"""What is assumed of released models where a server adds up noise that others made."""
