"""Masked sums: the server sees the sum of the clients' contributions, but no single one.

This module has the server's end of a sum, and the names in the messages; `masked_member` has the
client's end. The protocol's arithmetic is in `flower_ext.secure.aggregation` (Bonawitz et al. 2017;
Bell et al. 2020).

============  ========================================  ===========================================
stage         message of the server                     answer of a client
============  ========================================  ===========================================
``begin``     an invitation                             public keys
``keys``      the neighbours' keys                      secret shares, encrypted for each neighbour
``delivery``  encrypted shares, in the round's request  its masked contribution (`seal`)
``question``  the list of lost members                  secret shares that unmask the sum
============  ========================================  ===========================================

A client's neighbours are the members with which it has masks in common. A client that fails or is
silent in one of these stages drops out of the round.

The first message of a round is an `Invitation`. Every later message begins with the digest of the
round's `RoundContext`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from logging import getLogger

from flwr.app import ArrayRecord, Message

from flower_ext.errors import IncompleteRound
from flower_ext.federation import records
from flower_ext.federation.failures import printable
from flower_ext.federation.records import Arrays, bytes_record, shaped, single_message
from flower_ext.federation.replies import LONGEST_REASON, RefusedReply, read_answer, read_metrics
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation, UploadCounts
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundDiscarded
from flower_ext.privacy.randomness import secure_generator
from flower_ext.secure.aggregation.aggregation_server import SumServer
from flower_ext.secure.aggregation.context import (
    Invitation,
    RoundContext,
    degree,
    graph_digest,
    graph_of,
)
from flower_ext.secure.messages import ProtocolMessage

log = getLogger("flwr")

BEGIN, KEYS, DELIVERY, UNMASK = "begin", "keys", "delivery", "question"
SENT = "message"
"""Names of arrays. A message of a stage holds one array with the stage's name; an answer, and a
masked contribution, hold one array with the name `SENT`."""


class MaskedSum(Summation):
    """Sums of masked contributions, for a plan with ``noise_placement=SecureSum(…)``."""

    mechanism: NoisedSum

    def open(self, opening: Opening) -> OpenMaskedSum:
        """Ask the cohort to agree on masks; clients that fail to agree leave the cohort."""
        return OpenMaskedSum(self.mechanism, opening)


class OpenMaskedSum(OpenSum):
    """The masked sum of one round, after its members have agreed on masks."""

    _mechanism: NoisedSum

    def __init__(self, mechanism: NoisedSum, opening: Opening) -> None:
        super().__init__(mechanism, opening)
        self._clients = opening.clients
        self._partitions = list(opening.cohort.partitions)
        assert mechanism.masked is not None
        self.parameters = parameters = mechanism.masked.parameters
        self._members = {partition: member for member, partition in enumerate(self._partitions)}
        size = len(self._partitions)
        if size < parameters.least_answers:  # clients of the cohort have withdrawn
            raise RoundDiscarded(
                f"{size} clients are left in the cohort: expected at least "
                f"least_answers={parameters.least_answers}"
            )
        num_neighbors = degree(size, parameters.num_neighbors)
        # Drawn after the cohort, so colluding clients cannot choose their neighbours.
        graph = graph_of(secure_generator().permutation(size).tolist(), num_neighbors)
        self._context = RoundContext(
            **{**vars(parameters), "members": size, "num_neighbors": num_neighbors},
            run=secrets.token_bytes(16),  # new also for a repeated round
            round_number=opening.number,
            graph=graph_digest(graph),
            bits=mechanism.masked.bits,
            length=sum(array.size for array in self._like.values()),
        )
        self._server = SumServer(self._context, graph)
        self._unmasking = False
        try:  # a message delivers the shares that a member's neighbours encrypted for it
            self._ask(BEGIN, self._server.invitations())
            self._ask(KEYS, self._server.keys())
            self._deliveries = self._server.deliveries()
        except IncompleteRound as error:
            raise RoundDiscarded(str(error)) from error
        ready = sorted(self._partitions[member] for member in self._deliveries)
        self.cohort = replace(opening.cohort, partitions=ready)

    def upload_counts(self, answered: int | None = None) -> UploadCounts:
        """Return the least number of answers in an unmasked sum, and of honest ones among them.

        If the answers have arrived and the unmasking has not begun, ``honest`` is 0, because nobody
        can see a sum yet.
        """
        is_visible = answered is None or self._unmasking
        return UploadCounts(
            needed=self.parameters.least_answers,
            honest=self.parameters.honest_answers if is_visible else 0,
        )

    def request(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the record that one client's training request carries for the sum."""
        delivery = self._deliveries[self._members[partition]]
        return {records.SECURE_SUM: bytes_record(DELIVERY, delivery.to_bytes())}

    def read(self, reply: Message) -> records.Update:
        """Read a masked contribution and add it to the sum.

        `add` has nothing left to do, because a sum of integers does not depend on the order.
        """
        metrics, arrays = read_metrics(reply), read_answer(reply, records.UPDATE)
        self._add(reply, arrays)
        return records.Update(arrays, metrics)

    def close(self) -> Aggregate:
        """Unmask the sum with the clients' help, and release its mean.

        Discard the round if too few clients answered in one of the stages. The server then cannot
        unmask a sum. Also discard the round if the sum is larger than a sum of honest clients can
        be.
        """
        try:
            requests = self._server.unmask_requests()
            # As soon as the first request leaves, an adversary may be able to see the sum.
            self._unmasking = True
            self._ask(UNMASK, requests)
            total = self._server.total()
        except IncompleteRound as error:
            raise RoundDiscarded(str(error)) from error
        finally:
            self._report_faults()
        mechanism = self._mechanism
        summed = mechanism.begin_sum(self._like)
        summed.add(shaped(total, self._like))
        summed.count = len(self._server.answered)
        # Members that left before the round count as members that did not answer.
        size = mechanism.num_members
        return mechanism.aggregate(summed, cohort_size=size, noise=self._opening.noise)

    def _ask(self, stage: str, content: Mapping[int, Invitation | ProtocolMessage]) -> None:
        """Send members the messages of a stage, and add each answer when it arrives."""
        contents = {
            self._partitions[member]: {records.SECURE_SUM: bytes_record(stage, message.to_bytes())}
            for member, message in content.items()
        }
        answers = self._clients.ask(
            contents, self._opening.server_round, lambda reply: self._add(reply, read_answer(reply))
        )
        for _ in answers:
            pass  # `ask` has refused each answer for which `_add` raised an error

    def _add(self, reply: Message, arrays: Arrays) -> None:
        """Add the message in a reply; refuse a message in the name of another member."""
        _, data = single_message(arrays, SENT)
        if (kind := self._server.awaited) is None:
            raise RefusedReply("a message after the last stage: expected none")
        message = kind.from_bytes(data, self._context)
        member = self._members[self._clients.partition_of(reply)]
        if message.member != member:
            raise RefusedReply(
                f"member={message.member}: expected {member}, the number of the client that sent "
                "the message"
            )
        self._server.add(message)

    def _report_faults(self) -> None:
        """Log each fault that the server found in a client's shares, and add it to the refusals."""
        number, faults = self._opening.server_round, self._server.faults
        for member, fault in sorted(faults, key=lambda found: found[0]):
            partitions = sorted(self._partitions[one] for one in faults[member, fault])
            reason = fault.value.format(neighbors=f"clients {str(partitions)[1:-1]}")
            text = f"round {number}: client {self._partitions[member]}: {reason}"
            refusal = printable(text[:LONGEST_REASON])
            log.warning("%s", refusal)
            self._clients.refusals.append(refusal)
