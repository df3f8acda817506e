"""A party of private weighting, and the dialogue of the parties.

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

from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting.oblivious import POINT_BYTES
from flower_ext.secure.weighting.party_settings import PartySettings

SettingsT = TypeVar("SettingsT", bound=PartySettings)
T = TypeVar("T")

BEGIN, KEYS, COUNT, DRAW = "begin", "keys", "count", "draw"
"""Names of the steps."""
KEY_BYTES = SEED_BYTES = 32
SEALED_SEED_BYTES = 12 + SEED_BYTES + 16  # nonce, seed, tag
NUMBER_BYTES = 8
OFFER_BYTES = NUMBER_BYTES + POINT_BYTES


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


class Party(Generic[SettingsT]):
    """A party of one run.

    Parameters
    ----------
    settings : PartySettings
    workers : int
        Number of threads.
    watch : Callable[[str], Progress], optional
        Returns, for the name of a long piece of work, a function to report its progress to.
    """

    def __init__(
        self,
        settings: SettingsT,
        *,
        workers: int = 1,
        watch: Callable[[str], Progress | None] = lambda work: None,
    ) -> None:
        self.settings = settings
        self._workers, self._watch = workers, watch
        self._last_round = 0
