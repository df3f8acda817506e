"""The server's set-up, draws and rounds, which are the same under every scheme.

=========  ==================================  =====================================================
step       message of the server               answer of a silo
=========  ==================================  =====================================================
``begin``  the settings                        its public key
``keys``   the server's key and all silos'     of silo 0: sealed seeds, and what its scheme adds
``count``  the seed sealed for the silo        masked counts
``draw``   an offer, to silo 0                 the silos' choices; before a round or epoch
=========  ==================================  =====================================================
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from numpy.typing import NDArray

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.party import (
    BEGIN,
    COUNT,
    DRAW,
    KEYS,
    Dialogue,
    Party,
    SettingsT,
    Stage,
    Step,
)
from flower_ext.secure.weighting.weighting_messages import (
    DrawAnswer,
    DrawOffer,
    MaskedCounts,
    Message,
    SealedSeed,
    SiloKey,
    check_all_there,
    check_keys,
    check_senders,
    read_from,
    unpack_numbers,
)

SumT = TypeVar("SumT", bound=Message)


class ServerParty(Party[SettingsT], Generic[SettingsT, SumT]):
    """The party with the secret key: it relays messages and decrypts sums.

    Call `set_up` once, or the steps that it takes: `relay_keys`, `relay_seed`, `receive_counts`.
    Then call `begin_round`, `read_sum` and `close_round` for every round. Keys last for one
    process: after a restart, set up anew.

    Parameters
    ----------
    settings, **options
        As for `Party`.
    """

    sum_type: ClassVar[type[Message]]
    """Message with a silo's masked sum."""

    def __init__(self, settings: SettingsT, **options: Any) -> None:
        super().__init__(settings, **options)
        self._open_round: int | None = None
        self._drawing: tuple[int, Sender] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run={self.settings.run!r}, last_round={self._last_round})"

    @property
    @abstractmethod
    def public_key(self) -> Message:
        """The server's public key, for all silos."""

    def set_up(self) -> Dialogue[None]:
        """Exchange keys and the silos' seed, and collect masked counts for all later rounds."""
        settings, silos = self.settings, range(self.settings.silos)
        greeting = dict.fromkeys(silos, settings.to_bytes())
        keys = yield Step(name=BEGIN, questions=greeting, length=SiloKey.size(settings))
        relayed = self.relay_keys(
            [read_from(silo, SiloKey, key, settings) for silo, key in keys.items()]
        )
        public = self.public_key.to_bytes() + b"".join(key.to_bytes() for key in relayed)
        size = SealedSeed.size(settings)
        of_seeds = size * (settings.silos - 1)
        answers = yield Step(
            name=KEYS,
            questions=dict.fromkeys(silos, public),
            length=of_seeds + self._added_bytes,
            answering=(0,),
        )
        sealed = answers[0]
        seeds = self.relay_seed(
            [
                SealedSeed.from_bytes(sealed[at : at + size], settings)
                for at in range(0, of_seeds, size)
            ]
        )
        self._take_added(sealed[of_seeds:])
        for_silos = {0: b""} | {seed.receiver: seed.to_bytes() for seed in seeds}
        length = MaskedCounts.size(settings)
        counts = yield Step(name=COUNT, questions=for_silos, length=length)
        self.receive_counts(
            [read_from(silo, MaskedCounts, masked, settings) for silo, masked in counts.items()]
        )

    @abstractmethod
    def begin_round(self, number: int, places: Collection[int] | None) -> Dialogue[bytes]:
        """Begin a round, and return the encrypted weights, the same for all silos.

        Parameters
        ----------
        number : int
            Higher than the number of every earlier round.
        places : Collection[int], optional
            Places, in the silos' secret order, of the users that take part. By default all users
            take part, or the protocol draws them.
        """

    @abstractmethod
    def close_round(self, messages: Sequence[SumT]) -> NDArray[Any]:
        """Return the weighted and noised sum over all silos, of shape (coordinates,).

        Raises
        ------
        IncompleteRound
            A silo's sum is missing; nothing was decrypted.
        OverflowError
            The sum is out of bounds: some user has more records than the settings allow, or a silo
            sent what is no sum.
        """

    def read_sum(self, silo: int, data: bytes) -> SumT:
        """Return a silo's sum if it is well formed and of the open round; else as `check_sum`."""
        message: Any = read_from(silo, self.sum_type, data, self.settings)
        self.check_sum(message)
        return message  # type: ignore[no-any-return]

    def relay_keys(self, keys: Sequence[SiloKey]) -> tuple[SiloKey, ...]:
        """Return the silos' public keys, for all silos.

        Raises
        ------
        ProtocolError
            The keys were relayed before.
        ValueError
            There is not exactly one key from each silo, or a key is malformed or of low order.
        """
        self._expect(Stage.NEW)
        for key in keys:
            key.check(self.settings)
        check_senders([key.silo for key in keys], range(self.settings.silos))
        check_keys({key.silo: key.public for key in keys})
        self._stage = Stage.KEYED
        return tuple(sorted(keys, key=lambda key: key.silo))

    def relay_seed(self, seeds: Sequence[SealedSeed]) -> tuple[SealedSeed, ...]:
        """Return silo 0's sealed seeds, each for its receiver.

        Raises
        ------
        ProtocolError
            The public keys were not relayed yet, or the seed was relayed before.
        ValueError
            There is not exactly one seed for each silo except silo 0.
        """
        self._expect(Stage.KEYED)
        for seed in seeds:
            seed.check(self.settings)
        check_senders([seed.receiver for seed in seeds], range(1, self.settings.silos))
        self._stage = Stage.SEEDED
        return tuple(sorted(seeds, key=lambda seed: seed.receiver))

    def receive_counts(self, messages: Sequence[MaskedCounts]) -> None:
        """Add up the masked counts of all silos; the masks cancel.

        Raises
        ------
        ProtocolError
            The seed was not relayed yet, or counts were received before.
        IncompleteRound
            A silo's counts are missing.
        ValueError
            A message is malformed, comes from a silo that the run does not have, or was sent twice;
            or the scheme refuses the totals.
        """
        self._expect(Stage.SEEDED)
        check_all_there([message.silo for message in messages], self.settings.silos)
        totals, modulus = [0] * self.settings.users, self._count_modulus
        for message in messages:
            message.check(self.settings)
            counts = unpack_numbers(message.counts, self.settings.count_bytes)
            if max(counts) >= modulus:
                raise InvalidValue(
                    f"counts of silo {message.silo}: expected integers below the modulus of "
                    "masked counts"
                )
            totals = [(t + count) % modulus for t, count in zip(totals, counts, strict=True)]
        self._take_totals(totals)
        self._stage = Stage.COUNTED

    def check_sum(self, message: SumT) -> None:
        """Check one silo's sum as soon as it arrives, before the other silos have answered.

        Raises
        ------
        ProtocolError
            No round is open, or the message belongs to another one.
        ValueError
            The message is malformed, or comes from a silo that the run does not have.
        """
        if self._open_round is None:
            raise ProtocolError("no round is open: open one and send its message to the silos")
        self._check_sum_of_round(message)
        message.check(self.settings)

    def _check_sums(self, messages: Sequence[SumT]) -> None:
        """Check that every silo sent one sum of the open round."""
        for message in messages:
            ServerParty.check_sum(self, message)  # not again what a scheme checks on arrival
        if self._open_round is None:
            raise ProtocolError("no round is open: open one and send its message to the silos")
        senders: list[int] = [message.silo for message in messages]  # type: ignore[attr-defined]
        check_all_there(senders, self.settings.silos)

    @property
    def _name(self) -> str:
        return "the server"

    @property
    @abstractmethod
    def _count_modulus(self) -> int:
        """Modulus of masked counts."""

    @abstractmethod
    def _take_totals(self, totals: list[int]) -> None:
        """Keep the sums of masked counts, by place in the silos' secret order, or refuse them."""

    @abstractmethod
    def _check_sum_of_round(self, message: SumT) -> None:
        """Raise a ProtocolError unless a sum belongs to the open round."""

    @property
    def _added_bytes(self) -> int:
        """Length of what silo 0 adds to the sealed seeds."""
        return 0

    def _take_added(self, data: bytes) -> None:
        """Take what silo 0 added to the sealed seeds; nothing by default."""

    def _ask_draw(self, offer: DrawOffer) -> Dialogue[DrawAnswer]:
        """Ask silo 0 for the silos' choices of a secret draw."""
        length = DrawAnswer.size(self.settings)
        answers = yield Step(name=DRAW, questions={0: offer.to_bytes()}, length=length)
        return DrawAnswer.from_bytes(answers[0], self.settings)

    def _drawn_places(self, sampled: Collection[int] | None) -> set[int]:
        """Return the places in the silos' secret order of users that the server named."""
        everyone = range(self.settings.users)
        drawn = set(everyone if sampled is None else sampled)
        if not drawn <= set(everyone):
            raise InvalidValue(f"sampled: expected integers from 0 to {self.settings.users - 1}")
        return drawn

    def _refuse_secret_draw(self) -> None:
        if self.settings.draw_choices is not None:
            raise ProtocolError(
                "the settings have draw_choices, so the server does not draw: call offer_draw and "
                "open what the silos draw instead"
            )

    def _expect_secret_draw(self) -> None:
        if self.settings.draw_choices is None:
            raise ProtocolError(
                "offer_draw: the settings have no draw_choices; name the drawn users instead"
            )

    def _offer_draw(self, number: int) -> DrawOffer:
        sender = Sender(self.settings.context)
        self._drawing = number, sender
        return DrawOffer(number=number, public=sender.public)

    def _sender_for(self, message: DrawAnswer) -> Sender:
        """Return the sender whose offer a draw's answer is for. Each offer is good for one."""
        if self._drawing is None or self._drawing[0] != message.number:
            raise ProtocolError(
                f"draw {message.number}: expected offer_draw for this round or epoch first"
            )
        message.check(self.settings)
        (_, sender), self._drawing = self._drawing, None
        return sender
