"""The server's side of one round's secure sum, over Flower's messages.

Two queries before the training let the clients agree on masks. One query after the training lets
the server unmask the sum. A client that fails or is silent in one of these four stages (the
training is one of them) drops out of the round.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from logging import getLogger
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.federation import records
from flower_ext.federation._flower_private import replies
from flower_ext.federation.client.sum_member import (
    BEGIN,
    DELIVERY,
    INDEX,
    KEYS,
    NEIGHBOURS,
    QUESTION,
    SENT,
)
from flower_ext.federation.exchange import Exchange
from flower_ext.federation.failures import printable
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.plan import Aggregate, RoundDiscarded
from flower_ext.privacy.randomness import secure_generator
from flower_ext.secure.aggregation import (
    Advert,
    Delivery,
    Keys,
    MaskedInput,
    Revealed,
    RoundContext,
    SealedShares,
    SumServer,
    UnmaskRequest,
    degree,
    draw_order,
    graph_digest,
    graph_of,
)

log = getLogger("flwr")

T = TypeVar("T", Advert, SealedShares, MaskedInput, Revealed)


@dataclass(frozen=True)
class MaskedUpdate(records.Update):
    """A masked upload and the metrics that came with it."""

    message: MaskedInput


class SecureRound:
    """One round: call `agree`, then `own` for each training message, `read` and `combine`.

    Parameters
    ----------
    plan : NoisedSum
        A plan with ``secure_aggregation``.
    asked : Iterable[int]
        Partitions of the cohort.
    exchange : Exchange
    grid : Grid
    number, server_round : int
        Number of the training round, and round number of the messages.
    noise : NoiseSource
        The server's source for the noise shares of clients that do not answer.
    like : Arrays
        Names and shapes of an update.
    """

    def __init__(
        self,
        plan: NoisedSum,
        asked: Iterable[int],
        *,
        exchange: Exchange,
        grid: Grid,
        number: int,
        server_round: int,
        noise: NoiseSource,
        like: records.Arrays,
    ) -> None:
        self._plan, self._noise, self._like = plan, noise, like
        self._exchange, self._grid, self._server_round = exchange, grid, server_round
        self._partitions = list(asked)
        self.parameters = parameters = plan.sum_parameters
        self._places = {partition: place for place, partition in enumerate(self._partitions)}
        members = len(self._partitions)
        neighbours = degree(members, parameters.neighbors)
        graph = graph_of(draw_order(members, secure_generator()), neighbours)
        self._context = RoundContext(
            run=secrets.token_bytes(16),  # a repeated round is a new one
            round_number=number,
            members=members,
            graph=graph_digest(graph),
            bits=plan.sum_bits,
            length=sum(array.size for array in like.values()),
            neighbours=neighbours,
            threshold=parameters.threshold,
            least_answers=parameters.least_answers,
        )
        self._server = SumServer(self._context, graph)
        self._deliveries: Mapping[int, records.Arrays] = {}
        self._unmasking = False

    @property
    def counts(self) -> tuple[int, int]:
        """Number of noise shares that a sum needs, and number that honest clients surely add.

        These are the least number of answers, and the least number of honest ones among them.
        """
        return self.parameters.least_answers, self.parameters.honest_answers

    @property
    def seen(self) -> tuple[int, int]:
        """Numbers as in `counts`, with no honest share before unmasking, when no sum is visible."""
        least, honest = self.counts
        return least, honest if self._unmasking else 0

    def agree(self) -> list[int]:
        """Let the clients agree on masks; return the partitions that can train.

        Raises
        ------
        RoundDiscarded
            Too few clients are left.
        """
        try:
            begin = {
                member: {
                    BEGIN: records.to_bytes_array(self._context.to_bytes()),
                    INDEX: np.array(member, dtype=np.int64),
                    NEIGHBOURS: np.array(neighbours, dtype=np.int64),
                }
                for member, neighbours in enumerate(self._server.graph)
            }
            self._take(self._ask(begin, Advert), self._server.add_advert)
            keys = self._server.keys()
            self._take(self._ask(_told(KEYS, keys), SealedShares), self._server.add_shares)
            deliveries = self._server.deliveries()
        except IncompleteRound as error:
            raise RoundDiscarded(str(error)) from error
        self._deliveries = _told(DELIVERY, deliveries)
        return sorted(self._partitions[member] for member in deliveries)

    def own(self, partition: int) -> dict[str, ArrayRecord]:
        """Return the record of the secure sum for one client's training message."""
        delivery = self._deliveries[self._places[partition]]
        return {records.SECURE_SUM: records.to_record(delivery)}

    def read(self, reply: Message) -> MaskedUpdate:
        """Read a masked upload; raise `RefusedReply` for anything else."""
        metrics = records.read_metrics(reply)
        message = self._read(reply, MaskedInput, records.UPDATE)
        return MaskedUpdate({}, metrics, message)

    def combine(self, updates: Iterable[tuple[int, records.Update]]) -> Aggregate:
        """Add masked uploads up as they arrive, and unmask their sum.

        Raises
        ------
        RoundDiscarded
            Too few clients answered in one of the stages, so nobody learns any part of a sum; or
            the sum is larger than honest clients' can be (`NoisedSum.aggregate_sum`).
        """
        self._take(map(_message_of, updates), self._server.add_masked)
        try:
            questions = self._server.unmask_requests()
            self._unmasking = True
            self._take(self._ask(_told(QUESTION, questions), Revealed), self._server.add_revealed)
            total = self._server.total()
        except IncompleteRound as error:
            raise RoundDiscarded(str(error)) from error
        finally:
            self._report_bad_shares()
        whole = total.view(np.int32 if self._context.bits == 32 else np.int64).astype(np.int64)
        cells, at = {}, 0
        for name in sorted(self._like):
            size = self._like[name].size
            cells[name] = whole[at : at + size].reshape(self._like[name].shape)
            at += size
        answered = len(self._server.answered)
        return self._plan.aggregate_sum(
            cells, answered=answered, noise=self._noise, like=self._like
        )

    def _ask(self, told: Mapping[int, records.Arrays], kind: type[T]) -> list[T]:
        """Ask members a stage's question, and return the accepted answers."""
        contents = {
            self._partitions[member]: {records.SECURE_SUM: records.to_record(arrays)}
            for member, arrays in told.items()
        }
        asked = self._exchange.ask("query", contents, self._server_round)
        heard = replies(self._grid, asked, timeout=self._exchange.timeout)
        answers = self._exchange.accepted(
            "query",
            self._server_round,
            heard,
            sorted(contents),
            lambda reply: self._read(reply, kind, records.ANSWER),
        )
        return list(answers.values())

    def _take(self, messages: Iterable[T], add: Callable[[T], None]) -> None:
        for message in messages:
            try:
                add(message)
            except (ProtocolError, InvalidValue) as error:
                self._refuse(f"client {self._partitions[message.member]}: {error}")

    def _read(self, reply: Message, kind: type[T], record: str) -> T:
        arrays = records.read_answer(reply, record)
        if set(arrays) != {SENT} or arrays[SENT].dtype != np.uint8:
            raise records.RefusedReply(
                f"arrays named {sorted(arrays)}: expected a single one, {SENT!r}, of bytes (uint8)"
            )
        message = kind.from_bytes(arrays[SENT].tobytes(), self._context)
        partition = self._exchange.partition_of(reply)
        if message.member != self._places[partition]:
            raise records.RefusedReply(
                f"member={message.member}: expected {self._places[partition]}, the number of the "
                "client that sent the message"
            )
        return message

    def _report_bad_shares(self) -> None:
        """Name the clients whose shares could not be opened, or did not fit the others."""
        for owner, holders in sorted(self._server.unopened.items()):
            self._refuse(
                f"client {self._partitions[owner]}: its sealed shares could not be opened by "
                f"{self._named(holders)}"
            )
        for sender, owners in sorted(self._server.wrong.items()):
            self._refuse(
                f"client {self._partitions[sender]}: it revealed wrong shares of the secrets of "
                f"{self._named(owners)}, unless these dealt them wrongly"
            )

        for owner in self._server.unfit:
            self._refuse(
                f"client {self._partitions[owner]}: no secret fits both its shares and what it "
                "published, so the round is discarded"
            )

    def _named(self, members: Iterable[int]) -> str:
        return "clients " + ", ".join(str(p) for p in sorted(self._partitions[m] for m in members))

    def _refuse(self, reason: str) -> None:
        said = printable(f"round {self._server_round}: {reason}"[: records.LONGEST_REASON])
        log.warning("%s", said)
        self._exchange.refusals.append(said)


def _told(
    name: str, messages: Mapping[int, Keys | Delivery | UnmaskRequest]
) -> dict[int, records.Arrays]:
    """Return each member's message as an array of that name."""
    return {
        member: {name: records.to_bytes_array(message.to_bytes())}
        for member, message in messages.items()
    }


def _message_of(update: tuple[int, records.Update]) -> MaskedInput:
    assert isinstance(update[1], MaskedUpdate)
    return update[1].message
