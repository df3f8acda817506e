"""Kinds of the entries in a run's ledger and in a study's account, and the fields of each kind."""

from collections.abc import Mapping
from typing import Any

RESERVE = "reserve"  # a release that is about to happen: round, identity, release
REPEAT = "repeat"  # a repetition that reveals nothing new: round and identity, or as in a charge
COMMIT = "commit"  # the end of a release: round, notes
DISCARD = "discard"  # the end of a round that released nothing: round, notes, reason
CHARGE = "charge"  # a run's spend after its next round: the fields of `Charge`, and budget
CLAIMS = "claims"  # a run's guarantees after its newest round: run, method, name, start, claims
DISCLOSURE = "uncovered"  # a disclosure that no ε covers: run, method, name, what
WITHDRAWN = "withdrawn"  # a user or client that withdrew: unit, number
FORGOTTEN = "forgotten"  # a client that withdrew, and whose node deleted its memory: number

WITHOUT_NOISE = "training without noise"
"""Value of the field ``what`` in the entry of a run that promises nothing to anybody."""


def label_of(entry: Mapping[str, Any]) -> str:
    """Return the name of an entry's run directory, or the beginning of the run's id."""
    return entry["name"] or str(entry["run"])[:8]
