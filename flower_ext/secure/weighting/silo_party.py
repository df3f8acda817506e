"""A silo's set-up, seed, draws and state, which are the same under every scheme."""

from __future__ import annotations

import operator
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from logging import getLogger
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.json_record import JsonRecord
from flower_ext.secure.keys_and_ciphers import KEY_BYTES, derive, public_of
from flower_ext.secure.messages import ProtocolMessage, check_length
from flower_ext.secure.pair_keys import PairKeys
from flower_ext.secure.weighting.agreement import (
    BEGIN,
    COUNT,
    DRAW,
    KEYS,
    NUMBER_BYTES,
    OFFER_BYTES,
    SEED_BYTES,
    SEEDING_SILO,
    PartySettings,
)
from flower_ext.secure.weighting.oblivious import Receiver

log = getLogger("flwr")

_SEED = "seed"
COUNTS = "counts"
"""Purpose of the masks on the users' numbers of records."""


class Stage(Enum):
    """The part of the set-up that a silo has completed: nothing, the keys, or the counts."""

    NEW = "new"
    KEYED = "keyed"
    COUNTED = "counted"


_STAGE_OF = {BEGIN: Stage.NEW, KEYS: Stage.NEW, COUNT: Stage.KEYED, DRAW: Stage.COUNTED}
"""Stage in which a silo takes each step."""


@dataclass(repr=False)
class SiloParty(JsonRecord, ABC):
    """One silo. Everything it holds is secret, except the messages that its methods return.

    Call `answer` for each step of the set-up and of draws, and `open_sum` for every round.
    To make a new silo, give only ``settings`` and its number ``index``, from 0. `to_bytes` returns
    all that the silo needs after a restart, with secrets in the clear, and `from_bytes` reads it.

    Attributes
    ----------
    save : Callable[[bytes], None]
        Function that stores the result of `to_bytes` so that it survives a crash. By default it
        does nothing. The silo calls it before it returns a masked sum or its answer to a step of
        the set-up. A silo restored from these bytes therefore uses no mask twice.
    """

    settings_type: ClassVar[type[PartySettings]]

    settings: PartySettings
    index: int
    private: bytes = field(default_factory=lambda: secrets.token_bytes(KEY_BYTES))
    silo_keys: list[bytes] = field(default_factory=list)
    server_key: bytes = b""
    seed: bytes = b""
    counts: list[int] = field(default_factory=list)
    last_round: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.settings.silos:
            raise InvalidValue(
                f"index={self.index!r}: expected an integer from 0 to {self.settings.silos - 1}"
            )
        self.save: Callable[[bytes], None] = lambda state: None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(index={self.index}, stage={self._stage.value})"

    @property
    def fingerprint(self) -> str:
        """Hash of all public keys, equal at all silos unless the server swapped keys."""
        return self._pairs.fingerprint

    @property
    def counted(self) -> tuple[int, ...]:
        """Users with records in this silo. Each of them has an update in every sum."""
        return tuple(user for user, count in enumerate(self.counts) if count)

    def answer(self, step: str, question: bytes, counts: Sequence[int] = ()) -> bytes:
        """Take one step of the set-up, or of a secret draw, and return the answer.

        The step ``count`` also takes the number of records of each user in this silo.

        Raises
        ------
        ProtocolError
            The step is unknown or out of order (``begin`` may be repeated until ``keys``). A
            ``draw`` also raises the error if the settings have no ``draw_choices``, or if this
            silo has already used this round or a later one.
        """
        if step not in _STAGE_OF:
            raise ProtocolError(f"step={step!r}: expected {BEGIN}, {KEYS}, {COUNT} or {DRAW}")
        self._expect(_STAGE_OF[step])
        if step == BEGIN:
            self.save(self.to_bytes())
            return public_of(self.private)
        if step == KEYS:
            return self._take_keys(question)
        if step == COUNT:
            return self._take_seed(question, counts)
        check_length("offer", question, OFFER_BYTES)
        number = int.from_bytes(question[:NUMBER_BYTES], "big")
        self._check_draw(number)
        return self._draw_receiver(number, question[NUMBER_BYTES:]).answer

    @abstractmethod
    def open_sum(self, number: int, weights: bytes) -> SiloSum:
        """Begin this silo's sum of round ``number``. Only `SiloSum.finish` marks the round as used.

        ``weights`` is the server's message of the round, from `ServerParty.begin_round`.

        Raises
        ------
        ProtocolError
            The set-up is not complete, the round may not follow the last one, or the weights belong
            to a different round.
        ValueError
            The weights are malformed.
        """

    def use_round(self, number: int) -> None:
        """Store that a round is used, before its masks are drawn; refuse a round used before."""
        self.settings.check_round(number, self.last_round)
        self.last_round = number
        self.save(self.to_bytes())

    @cached_property
    def _pairs(self) -> PairKeys:
        """The keys that this silo shares with every other silo."""
        return PairKeys(
            context=self.settings.context,
            index=self.index,
            private=self.private,
            public_keys=self.silo_keys,
            server_key=self.server_key,
        )

    @cached_property
    def _order(self) -> list[int]:
        """The users in the silos' secret order."""
        return user_order(self.seed, self.settings.users)

    @abstractmethod
    def _check_server_key(self, server_key: bytes) -> None:
        """Raise a ValueError if ``server_key`` cannot be a public key of the scheme."""

    @abstractmethod
    def _count_answer(self) -> bytes:
        """Return the masked counts, in the users' secret order. The server cannot read them."""

    def _check_draw(self, number: int) -> None:
        """Raise a ProtocolError if this silo has already used round ``number`` or a later one."""
        self.settings.check_round(number, self.last_round)

    def _check_opening(self, number: int) -> None:
        """Raise a ProtocolError unless the silo may begin its sum of round ``number``."""
        self._expect(Stage.COUNTED)
        self.settings.check_round(number, self.last_round)

    @property
    def _stage(self) -> Stage:
        # Derived from the stored fields, so that a restored silo cannot be in a different stage.
        return Stage.COUNTED if self.counts else Stage.KEYED if self.silo_keys else Stage.NEW

    def _expect(self, stage: Stage) -> None:
        if self._stage is not stage:
            raise ProtocolError(
                f"silo {self.index} is in stage {self._stage.value}: expected stage {stage.value}; "
                "take the steps of the set-up in order, each once"
            )

    def _take_keys(self, question: bytes) -> bytes:
        """Agree on a key with every other silo; silo 0 returns the seed, sealed for the others."""
        end = KEY_BYTES * self.settings.silos
        keys = [question[start : start + KEY_BYTES] for start in range(0, end, KEY_BYTES)]
        server_key = question[end:]
        self._check_server_key(server_key)
        _ = replace(self, silo_keys=keys, server_key=server_key)._pairs  # refuses unusable keys
        self.silo_keys, self.server_key = keys, server_key
        answer = b""
        if self.index == SEEDING_SILO:
            part = secrets.token_bytes(SEED_BYTES)
            others = range(1, self.settings.silos)
            answer = b"".join(self._pairs.seal(silo, _SEED, part) for silo in others)
            self._mix_seed(part)
        self.save(self.to_bytes())
        # Log a warning, because usual settings of the log hide lower levels.
        log.warning(
            "silo %d: the fingerprint of all silos' keys is %s; compare it with the other silos' "
            "fingerprints, which differ if somebody swapped a key on the way",
            self.index,
            self.fingerprint,
        )
        return answer

    def _take_seed(self, question: bytes, counts: Sequence[int]) -> bytes:
        """Open the seed that silo 0 sealed, store the counts, and return the masked counts."""
        limit = self.settings.record_limit(self.index)
        if self.index != SEEDING_SILO:
            self._mix_seed(self._pairs.open(SEEDING_SILO, _SEED, question))
        held = [operator.index(count) for count in counts]
        if len(held) != self.settings.users:
            raise InvalidValue(
                f"counts of {len(held)} users: expected counts of {self.settings.users} users"
            )
        if not all(0 <= count <= limit for count in held):
            raise InvalidValue(
                f"counts: expected 0 to {limit} records of each user in this silo; leave records "
                "out, or raise silo_record_limits or max_records_per_user of the run"
            )
        # Store the counts before masks are drawn, so that a restored silo cannot put other counts
        # under the same masks.
        self.counts = held
        self.save(self.to_bytes())
        return self._count_answer()

    def _mix_seed(self, part: bytes) -> None:
        """Derive the silos' seed from random bytes of silo 0, which the server does not know.

        The derivation includes the server's fresh key, so that silo 0 cannot choose the seed.
        """
        check_length("seed", part, SEED_BYTES)
        self.seed = derive(part, "seed", self.server_key, self.settings.context)

    def _draw_receiver(self, number: int, offer: bytes) -> Receiver:
        """Return the receiver of a round's draw, the same for all silos."""
        if self.settings.draw_choices is None:
            raise ProtocolError(
                "step='draw': expected settings with draw_choices; leave this step out, because "
                "without draw_choices the server decides which users take part"
            )
        return Receiver(
            offer,
            derive(self.seed, "draw", number),
            run=self.settings.context,
            transfers=self.settings.users,
            num_texts=self.settings.draw_choices,
        )


class SiloSum(ABC):
    """A silo's sum of one round. Callers may add a user's update as soon as its training ends."""

    def __init__(self, silo: SiloParty, number: int) -> None:
        self._number = number
        self._missing = set(silo.counted)
        self._coordinates = silo.settings.coordinates
        self._is_open = True

    def add(self, updates: Mapping[int, ArrayLike]) -> None:
        """Add clipped updates, each of shape (coordinates,), by user.

        Every user must have records in this silo, and may be added once. Adding a few dozen users
        at a time is as fast as adding all of them. Arrays may be memory-mapped.

        Raises
        ------
        ProtocolError
            The sum is finished, or updates were refused before.
        ValueError
            A user has no records in this silo or was added before, a shape is wrong, or a value is
            not finite or out of bounds. After a refused update, open the sum again.
        """
        self._expect_open()
        if unknown := sorted(updates.keys() - self._missing):
            raise InvalidValue(
                f"updates of users {unknown}: expected users with records in this silo, each once"
            )
        vectors = {user: self._vector("updates", update) for user, update in updates.items()}
        self._is_open = False  # restored below if all updates are accepted
        self._add(vectors)
        self._is_open = True
        self._missing -= updates.keys()

    def finish(self, noise: ArrayLike) -> bytes:
        """Return the masked sum with this silo's share of the noise, and mark the round as used.

        If a user has records in this silo but nobody added its update, its update counts as zero.

        Raises
        ------
        ProtocolError
            The sum is finished, updates were refused, or the silo used this round or a later one.
        ValueError
            The weights are malformed; or the noise is not finite, too large or, over ring-LWE, too
            small. After this error, the round is unused, and nothing has left the silo.
        """
        self._expect_open()
        message = self._masked(self._vector("noise", noise))
        self._is_open = False
        return message.to_bytes()

    @abstractmethod
    def _add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        """Add updates of the right shape; refuse values that are not finite or out of bounds."""

    @abstractmethod
    def _masked(self, noise: NDArray[Any]) -> ProtocolMessage:
        """Return the message of `finish`; call `SiloParty.use_round` before masks are drawn."""

    def _expect_open(self) -> None:
        if not self._is_open:
            raise ProtocolError(
                "this sum is finished, or its updates were refused: call open_sum again"
            )

    def _vector(self, name: str, values: ArrayLike) -> NDArray[Any]:
        array = np.asarray(values)
        if array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float64)
        if array.shape != (self._coordinates,):
            raise InvalidValue(f"{name} of shape {array.shape}: expected ({self._coordinates},)")
        return np.ascontiguousarray(array)


def user_order(seed: bytes, users: int) -> list[int]:
    """Return the users in an order that is uniform to a party that does not know ``seed``.

    The server numbers users by their place in this order. It therefore cannot tell which user has
    no records, or which user it drew.
    """
    return sorted(range(users), key=lambda user: derive(seed, "order", user))
