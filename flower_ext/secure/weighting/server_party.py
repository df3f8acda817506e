"""The server's set-up, draws and rounds, which are the same under every scheme."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from numpy.typing import NDArray

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.secure.keys_and_ciphers import check_public
from flower_ext.secure.messages import ProtocolMessage, check_length, unpack_numbers
from flower_ext.secure.weighting.agreement import (
    BEGIN,
    COUNT,
    DRAW,
    KEYS,
    NUMBER_BYTES,
    SEALED_SEED_BYTES,
    SEEDING_SILO,
    Dialogue,
    PartySettings,
    ProtocolStep,
    SumMessage,
)
from flower_ext.secure.weighting.oblivious import Sender

SettingsT = TypeVar("SettingsT", bound=PartySettings)
SumT = TypeVar("SumT", bound=SumMessage)


class ServerParty(ABC, Generic[SettingsT, SumT]):
    """The party with the secret key: it relays messages and decrypts sums.

    Take all steps of `set_up` once. For every round, take the steps of `begin_round`, call
    `add_sum` for each silo's sum, and call `close_round` when all sums are there. Keys last for one
    process, so repeat the set-up after a restart.
    """

    sum_type: ClassVar[type[SumMessage]]
    """Class of the message with a silo's masked sum."""

    def __init__(self, settings: SettingsT) -> None:
        self.settings = settings
        self._last_round = 0
        self._is_set_up = False
        self._open_round: int | None = None
        self._sums: dict[int, SumT] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run={self.settings.run!r}, last_round={self._last_round})"

    @property
    @abstractmethod
    def public_key(self) -> bytes:
        """The server's public key, for all silos."""

    def set_up(self) -> Dialogue[None]:
        """Exchange keys and the silos' seed, and collect masked counts for all later rounds."""
        settings, silos = self.settings, range(self.settings.silos)
        keys = yield ProtocolStep(name=BEGIN, questions=dict.fromkeys(silos, settings.to_bytes()))
        _check_keys(keys)
        # All silos get the same keys: with different keys, a silo logs a different fingerprint.
        public = b"".join(keys[silo] for silo in silos) + self.public_key
        answers = yield ProtocolStep(name=KEYS, questions=dict.fromkeys(silos, public))
        sealed, others = answers[SEEDING_SILO], silos[1:]
        check_length("sealed seeds", sealed, SEALED_SEED_BYTES * len(others))
        starts = range(0, len(sealed), SEALED_SEED_BYTES)
        seeds = [sealed[start : start + SEALED_SEED_BYTES] for start in starts]
        questions = {SEEDING_SILO: b"", **dict(zip(others, seeds, strict=True))}
        counts = yield ProtocolStep(name=COUNT, questions=questions)
        self._take_counts(counts)
        self._is_set_up = True

    def begin_round(self, number: int, places: Collection[int] | None) -> Dialogue[bytes]:
        """Begin a round, and return one message with encrypted weights, for all silos.

        The server abandons an earlier round that is still open. If the settings have
        ``draw_choices``, the silos draw the users, and ``places`` must be None. Otherwise,
        ``places`` are the positions, in the silos' secret order, of the users that take part; None
        stands for all users.

        Raises
        ------
        ProtocolError
            The set-up is not complete, the number is not above the last round's number, or places
            are given although the silos draw users.
        ValueError
            A place is out of range.
        """
        settings = self.settings
        if not self._is_set_up:
            raise ProtocolError("the set-up is not complete: take all steps of set_up first")
        settings.check_round(number, self._last_round)
        if places is not None and settings.draw_choices is not None:
            raise ProtocolError(
                "places: expected None, because the settings have draw_choices: the silos draw the "
                "users, and the server does not learn which"
            )
        if not set(places or ()) <= set(range(settings.users)):
            raise InvalidValue(f"places: expected integers from 0 to {settings.users - 1}")
        if settings.draw_choices is None:
            weights = self._open_weights(number, places)
        else:
            sender = Sender(settings.context)
            offer = number.to_bytes(NUMBER_BYTES, "big") + sender.public
            answers = yield ProtocolStep(name=DRAW, questions={SEEDING_SILO: offer})
            weights = self._sealed_weights(number, sender, answers[SEEDING_SILO])
        self._last_round = self._open_round = number
        self._sums = {}
        return weights.to_bytes()

    def add_sum(self, silo: int, data: bytes) -> None:
        """Accept a silo's sum if it is well formed, names this silo and is of the open round.

        Raises
        ------
        ProtocolError
            No round is open, the sum is of a different round, or the silo sent a sum before.
        ValueError
            The sum is malformed, or names a different silo as its sender.
        """
        message: Any = self.sum_type.from_bytes(data, self.settings)
        if message.silo != silo:
            kind = self.sum_type.__name__
            raise InvalidValue(f"{kind} of silo {message.silo}: expected silo {silo}, its sender")
        self._expect_open()
        if message.round_number != self._open_round:
            raise ProtocolError(
                f"sum of round {message.round_number}: expected round {self._open_round}"
            )
        if silo in self._sums:
            raise ProtocolError(
                f"silo {silo} has already sent its sum: expected one sum from each silo"
            )
        self._check_sum(message)
        self._sums[silo] = message

    def close_round(self) -> NDArray[Any]:
        """Return the weighted and noised sum over all silos, of shape (coordinates,).

        Raises
        ------
        IncompleteRound
            A silo's sum is missing; nothing was decrypted, and the round stays open.
        ProtocolError
            No round is open.
        OverflowError
            The sum is out of bounds: some user has more records than the settings allow, or a silo
            sent something other than a sum.
        """
        self._expect_open()
        if missing := sorted(set(range(self.settings.silos)) - self._sums.keys()):
            raise IncompleteRound(
                f"silos {missing} sent nothing: expected messages from all {self.settings.silos}"
            )
        sums, self._sums, self._open_round = self._sums, {}, None
        return self._decrypted([*sums.values()])

    @abstractmethod
    def _decrypted(self, messages: Sequence[SumT]) -> NDArray[Any]:
        """Return the sum of all silos' messages; raise the OverflowError of `close_round`."""

    def _check_sum(self, message: SumT) -> None:
        """Refuse a message of the right length that holds no sum."""

    @abstractmethod
    def _open_weights(self, number: int, places: Collection[int] | None) -> ProtocolMessage:
        """Return the weights of users that the server drew: those at ``places``, or all users."""

    @abstractmethod
    def _sealed_weights(self, number: int, sender: Sender, choices: bytes) -> ProtocolMessage:
        """Return ``draw_choices`` sealed weights for each user; the silos can open one of them.

        With ``winning_choices`` of these weights the user takes part, and with the others not.
        ``choices`` is the answer of silo 0 to the offer of ``sender``.
        """

    @abstractmethod
    def _take_counts(self, counts: Mapping[int, bytes]) -> None:
        """Store what the server needs to compute weights from each silo's masked counts."""

    def _expect_open(self) -> None:
        if self._open_round is None:
            raise ProtocolError(
                "no round is open: call begin_round and send its message to the silos"
            )

    def _totals(self, counts: Mapping[int, bytes], modulus: int) -> list[int]:
        """Return each user's total, in the secret order: masks cancel in the sum of counts."""
        settings = self.settings
        totals = [0] * settings.users
        for silo, data in counts.items():
            check_length(f"counts of silo {silo}", data, settings.users * settings.count_bytes)
            masked = unpack_numbers(data, settings.count_bytes)
            if max(masked) >= modulus:
                raise InvalidValue(
                    f"counts of silo {silo}: expected integers below the modulus of masked counts"
                )
            totals = [(t + count) % modulus for t, count in zip(totals, masked, strict=True)]
        return totals


def _check_keys(keys: Mapping[int, bytes]) -> None:
    """Refuse public keys that are unusable, or that one silo copied from another."""
    first: dict[bytes, int] = {}
    for silo, public in keys.items():
        if (other := first.setdefault(public, silo)) != silo:
            raise InvalidValue(
                f"silos {other} and {silo} sent the same public key: expected a different key from "
                "each silo"
            )
        try:
            check_public(public)
        except InvalidValue as error:
            raise InvalidValue(f"silo {silo}: {error}") from error
