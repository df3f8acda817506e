"""The server's set-up, draws and rounds, which are the same under every scheme."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.weighting.oblivious import Sender
from flower_ext.secure.weighting.party import Party, SettingsT
from flower_ext.secure.weighting.party_state import Stage
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
    unpack_numbers,
)

SumT = TypeVar("SumT", bound=Message)


class ServerParty(Party[SettingsT], Generic[SettingsT, SumT]):
    """The party with the secret key: it relays messages and decrypts sums.

    Call `relay_keys`, `relay_seed`, `receive_counts` once, in this order. A scheme adds the rounds.

    Parameters
    ----------
    settings, save, workers
        As for `Party`.
    """

    def __init__(
        self,
        settings: SettingsT,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        super().__init__(settings, save=save, workers=workers)
        self._open_round: int | None = None
        self._drawing: tuple[int, Sender] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run={self.settings.run!r}, last_round={self._last_round})"

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
        self._advance(Stage.KEYED)
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
        self._advance(Stage.SEEDED)
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
        self._advance(Stage.COUNTED)

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
