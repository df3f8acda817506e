"""Settings, steps and messages of a run that are the same for every encryption scheme.

The server and the silos take these steps before a sum:

=========  ==========================================  =============================================
step       message of the server                       answer of a silo
=========  ==========================================  =============================================
``begin``  the settings                                its public key
``keys``   public keys of all silos and of the server  silo 0: the seed, sealed for every other silo
``count``  the seed, sealed for the silo               its masked counts
``draw``   to silo 0: a round's number and an offer    silo 0: the hidden choices of all silos
=========  ==========================================  =============================================

The offer begins an oblivious transfer.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

from flower_ext.checks import Checked, Count, Several
from flower_ext.errors import InvalidValue
from flower_ext.json_record import JsonRecord
from flower_ext.secure.keys_and_ciphers import ENCRYPTION_OVERHEAD_BYTES
from flower_ext.secure.messages import ProtocolMessage, check_later

T = TypeVar("T")

BEGIN, KEYS, COUNT, DRAW = "begin", "keys", "count", "draw"
"""Names of the steps."""
SEEDING_SILO = 0
"""The silo that draws the silos' seed, and answers for all silos in a secret draw."""
SEED_BYTES = 32
SEALED_SEED_BYTES = SEED_BYTES + ENCRYPTION_OVERHEAD_BYTES
NUMBER_BYTES = 8
OFFER_BYTES = NUMBER_BYTES + 32  # a point of the oblivious transfer


@dataclass(frozen=True, kw_only=True)
class PartySettings(Checked, JsonRecord, ABC):
    """Public settings of one run, checked at construction. Each scheme adds further settings.

    The ``kind`` is the name of the protocol. The name ``run`` must never have been used, because
    masks derive from it. ``coordinates`` is the length of an update. If ``draw_choices`` is given,
    each user takes part in a round with probability ``winning_choices`` / ``draw_choices``, and no
    party learns which users take part.
    """

    run: str
    users: Count
    silos: Several
    coordinates: Count
    draw_choices: int | None = None
    winning_choices: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.run:
            raise InvalidValue("run='': expected a name that no other run has")
        choices, drawn = self.draw_choices, self.winning_choices
        if choices is not None and not 0 < drawn < choices:
            raise InvalidValue(
                f"winning_choices={drawn!r}: expected an integer from 1 to draw_choices - 1 = "
                f"{choices - 1}, because a draw takes some users and leaves others out"
            )

    @cached_property
    def context(self) -> bytes:
        """Hash of the protocol and all fields, from which keys and masks derive.

        Parties with different settings cannot read each other's messages.
        """
        return hashlib.sha256(self.to_bytes()).digest()

    @property
    def insecurity(self) -> str:
        """Text that says why these settings suit only simulations; empty if they protect users."""
        return ""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Largest change that one user can make to a decoded sum, in units of the clipping norm.

        Without rounding it would be 1; rounding can only increase it.
        """

    @property
    def approximation_error(self) -> float:
        """Distance of a decoded sum from the exact one, in clipping norms: see `NoisedSum`."""
        return 0.0

    @property
    @abstractmethod
    def count_bytes(self) -> int:
        """Length in bytes of a masked count."""

    @abstractmethod
    def record_limit(self, silo: int) -> int:
        """Return the most records that one user may have in ``silo``."""

    def check_round(self, number: int, last: int) -> None:
        """Raise a ProtocolError unless round ``number`` may follow ``last``, the last round."""
        check_later("round", number, last)


@dataclass(frozen=True, kw_only=True)
class ProtocolStep:
    """A step of the protocol, with the server's message to each silo that takes it."""

    name: str
    questions: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class SumMessage(ProtocolMessage):
    """Base class of the message with a silo's masked sum; a scheme's subclass adds the sum."""

    round_number: int
    silo: int


Dialogue: TypeAlias = Generator[ProtocolStep, Mapping[int, bytes], T]
"""A generator of the server: it yields each step, and receives the silos' answers to it."""
