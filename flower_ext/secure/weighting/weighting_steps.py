"""The dialogue of the server and the silos before and between the sums of private weighting.

=========  ==================================  =====================================================
step       message of the server               answer of a silo
=========  ==================================  =====================================================
``begin``  the settings                        its public key
``keys``   the server's key and all silos'     of silo 0: sealed seeds, and what its scheme adds
``count``  the seed sealed for the silo        masked counts
``draw``   a number and an offer, to silo 0    the silos' choices; before a round or epoch
=========  ==================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")

BEGIN, KEYS, COUNT, DRAW = "begin", "keys", "count", "draw"
"""Names of the steps."""
KEY_BYTES = SEED_BYTES = 32
SEALED_SEED_BYTES = 12 + SEED_BYTES + 16  # nonce, seed, tag
NUMBER_BYTES = 8
OFFER_BYTES = NUMBER_BYTES + 32  # a point of the oblivious transfer


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the protocol: what the server sends to silos, and what they answer.

    Parameters
    ----------
    name : str
    questions : Mapping[int, bytes]
        The message to each silo that takes the step.
    length : int
        Length of an answer in bytes.
    answering : Collection[int], optional
        Silos whose answers hold bytes; the others only confirm. By default all.
    """

    name: str
    questions: Mapping[int, bytes]
    length: int
    answering: Collection[int] | None = None


Dialogue: TypeAlias = Generator[Step, Mapping[int, bytes], T]
"""Steps that the server takes one by one: it yields each, and receives the silos' answers."""
