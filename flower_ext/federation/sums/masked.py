"""Masked sums: the server sees the sum of the clients' contributions, but no single one.

This module has both ends of a sum, and the names in the messages. The protocol's arithmetic is in
`flower_ext.secure.aggregation` (Bonawitz et al. 2017; Bell et al. 2020).

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

A client stores its secrets in its `ClientVault` before a reply leaves. If another process has
stored secrets since this process read them, the vault raises an error, and no reply leaves. A
client therefore never answers a message twice, even if its process is restarted or a second process
runs at the same time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, Message

from flower_ext.data import ClientData
from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError, knowing_no_data
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import printable
from flower_ext.federation.messages.records import Arrays, bytes_record, flattened, shaped
from flower_ext.federation.messages.replies import LONGEST_REASON, read_message, read_metrics
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.storage.memory import ClientVault
from flower_ext.federation.sums.summation import (
    ClientSum,
    Opening,
    OpenSum,
    Summation,
    UploadCounts,
)
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundDiscarded
from flower_ext.privacy.mechanisms.updates import NamedArrays
from flower_ext.privacy.randomness import secure_generator
from flower_ext.secure.aggregation.aggregation_messages import Delivery, Keys, UnmaskRequest
from flower_ext.secure.aggregation.aggregation_server import SumServer
from flower_ext.secure.aggregation.context import (
    Invitation,
    RoundContext,
    degree,
    graph_digest,
    graph_of,
)
from flower_ext.secure.aggregation.identities import Identities
from flower_ext.secure.aggregation.member import Member
from flower_ext.secure.messages import ProtocolMessage

log = getLogger("flwr")

MASKED_SUM = records.SUM + "masked"
"""Name of the record of the server's messages."""
OF_MASKED_SUM = "-sum"
"""Ending of the methods' names in vaults with keys of masked sums."""
BEGIN, KEYS, DELIVERY, UNMASK = "begin", "keys", "delivery", "question"
SENT = "message"
"""Names of arrays. A message of a stage, and its answer, hold one array with the stage's name; a
masked contribution holds one array with the name `SENT`."""


class MaskedSum(Summation):
    """Sums of masked contributions, for a plan with ``noise_placement=SecureSum(…)``."""

    masks = True
    mechanism: NoisedSum

    def open(self, opening: Opening) -> OpenMaskedSum:
        """Ask the cohort to agree on masks; clients that fail to agree leave the cohort."""
        opened = OpenMaskedSum(self.mechanism, opening)
        opened.agree()
        return opened


class OpenMaskedSum(OpenSum):
    """The masked sum of one round; its members have agreed on masks once `agree` has returned."""

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
        self._deliveries: Mapping[int, Delivery] = {}
        self._unmasking = False

    def agree(self) -> None:
        """Let the members agree on masks; those that fail leave the cohort.

        Raises
        ------
        RoundDiscarded
            Too few members are left.
        """
        try:  # a message delivers the shares that a member's neighbours encrypted for it
            self._ask(BEGIN, self._server.invitations())
            self._ask(KEYS, self._server.keys())
            self._deliveries = self._server.deliveries()
        except IncompleteRound as error:
            raise RoundDiscarded(str(error)) from error
        ready = sorted(self._partitions[member] for member in self._deliveries)
        self.cohort = replace(self.cohort, partitions=ready)

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
        return {MASKED_SUM: bytes_record(DELIVERY, delivery.to_bytes())}

    def read(self, reply: Message) -> Update:
        """Add a masked contribution to the sum, and return what the client reports beside it.

        `add` has nothing left to do, because a sum of integers does not depend on the order.
        """
        metrics = read_metrics(reply)
        self._add(reply, read_message(reply, SENT, record=records.UPDATE)[1])
        return Update({}, metrics)

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
        """Send members the messages of a stage; hand each answer to the protocol on arrival."""
        contents = {
            self._partitions[member]: {MASKED_SUM: bytes_record(stage, message.to_bytes())}
            for member, message in content.items()
        }
        answers = self._clients.ask(
            contents,
            self._opening.server_round,
            lambda reply: self._add(reply, read_message(reply, stage)[1]),
        )
        for _ in answers:
            pass  # `ask` has refused each answer for which `_add` raised an error

    def _add(self, reply: Message, data: bytes) -> None:
        """Hand the bytes in a reply to the protocol."""
        self._server.receive(self._members[self._clients.partition_of(reply)], data)

    def _report_faults(self) -> None:
        """Log each fault that the server found in secret shares, and add it to the refusals."""
        number, faults = self._opening.server_round, self._server.faults
        for member, fault in sorted(faults, key=lambda found: found[0]):
            partitions = sorted(self._partitions[one] for one in faults[member, fault])
            reason = fault.value.format(neighbors=f"clients {str(partitions)[1:-1]}")
            text = f"round {number}: client {self._partitions[member]}: {reason}"
            refusal = printable(text[:LONGEST_REASON])
            log.warning("%s", refusal)
            self._clients.refuse(refusal)


class MaskedMember(ClientSum):
    """A client's end of a masked sum: its answers to the server, and its masked contribution."""

    name = MASKED_SUM
    is_secure = True

    def check(self, protection: Protection) -> None:
        """Refuse a protection that makes no whole numbers: masks hide whole numbers only."""
        if protection.cell is None:
            raise InvalidValue.tellable(
                f"the server's message has {MASKED_SUM!r} with {type(protection).__name__} "
                "without a cell: expected ClipAndNoise with a cell, as the server's "
                "FederatedStrategy sends it"
            )

    def answer(self, data: Callable[[], ClientData], *, may_simulate: bool) -> bytes:
        """Answer a message of the stage ``begin``, ``keys`` or ``question``."""
        # Read files outside the block below: the server must not see an error in reading them.
        node_config = self.context.node_config
        identities = identities_of(node_config)
        with knowing_no_data():
            stage, content = self.message.of(BEGIN, KEYS, UNMASK)
            vault = self._vault
            member = _invited(vault, content) if stage == BEGIN else _stored(vault)
            reply: ProtocolMessage
            if stage == BEGIN:
                check_limits(member.context, node_config)
                reply = member.advertise(identities=identities)
            elif stage == KEYS:
                keys = Keys.from_bytes(content, member.context)
                reply = member.share(keys, identities=identities)
            else:
                reply = member.unmask(UnmaskRequest.from_bytes(content, member.context))
            vault.store(member.to_bytes())
        return reply.to_bytes()

    def seal(self, update: NamedArrays, protection: Protection) -> Arrays:
        """Return a protected update, masked.

        The update holds int64 integers, in steps of the plan's grid. The client sends these
        integers modulo a power of two, in the order of the arrays' names.
        """
        self.check(protection)
        arrays = records.arrays_of(update)
        with knowing_no_data():
            vault = self._vault
            member = _stored(vault)
            vector = flattened(arrays)
            _, content = self.message.of(DELIVERY)
            delivery = Delivery.from_bytes(content, member.context)
            upload = member.mask(delivery, vector.astype(member.context.dtype))
            vault.store(member.to_bytes())
        return {SENT: records.to_bytes_array(upload.to_bytes())}

    @property
    def _vault(self) -> ClientVault:
        return ClientVault(self.context, self.method + OF_MASKED_SUM)


def check_limits(context: RoundContext, node_config: Mapping[str, Any]) -> None:
    """Refuse, by a PermissionError, a sum that shows the server more than the node's owner permits.

    =============================  ===========================================================
    node config                    meaning
    =============================  ===========================================================
    ``least-sum-members``          least number of members whose vectors are in a sum
    ``least-sum-threshold-share``  least fraction of a member's neighbours that must help to
                                   unmask this member's vector
    ``sum-colluders``              number of other members that may collude with the server
    ``least-honest-answers``       least number of members that do not collude, this one
                                   included, in every sum that the server may unmask
                                   (`SumParameters.honest_answers`)
    =============================  ===========================================================
    """
    least_members = int(node_config.get("least-sum-members", 0))
    least_share = float(node_config.get("least-sum-threshold-share", 0.0))
    colluders = int(node_config.get("sum-colluders", 0))
    least_honest = int(node_config.get("least-honest-answers", 0))
    if context.least_answers < least_members:
        raise PermissionError(
            f"the server could unmask a sum of only {context.least_answers} members: the owner of "
            f"this node requires least-sum-members={least_members}; take larger cohorts"
        )
    if context.threshold < least_share * context.num_neighbors:
        raise PermissionError(
            f"{context.threshold} of {context.num_neighbors} neighbours may together unmask this "
            "client's vector: the owner of this node requires "
            f"least-sum-threshold-share={least_share:g}"
        )
    if least_honest > (honest := _honest_answers(context, colluders)):
        raise PermissionError(
            f"the server could unmask a sum of only {honest} honest members: the owner of this "
            f"node requires least-honest-answers={least_honest} with sum-colluders={colluders}"
        )


def identities_of(node_config: Mapping[str, Any]) -> Identities | None:
    """Return the node's signing key and the public keys of the members that its owner trusts.

    The node then takes part in signed sums only. Return None if the node config names no keys: the
    node then takes part in unsigned sums only.
    """
    key, members = (node_config.get(name) for name in ("sum-identity-key", "sum-members"))
    if (key is None) != (members is None):
        raise InvalidValue.tellable(
            "node config: expected both sum-identity-key and sum-members, or neither of them"
        )
    return None if key is None else Identities.read(str(key), str(members))


def _honest_answers(context: RoundContext, colluders: int) -> int:
    """Return the least number of honest members in a sum that the server can unmask.

    Return 0 if the server and ``colluders`` members could unmask a single member's vector.
    """
    if 2 * context.threshold <= context.num_neighbors + colluders:
        return 0
    return replace(context, colluders=colluders).honest_answers


def _invited(vault: ClientVault, data: bytes) -> Member:
    invitation = Invitation.from_bytes(data)
    if (stored := vault.load()) is not None:
        with suppress(InvalidValue):  # secrets that cannot be read belong to no round
            if Member.from_bytes(stored).context == invitation.context:
                raise ProtocolError(
                    f"the server begins round {invitation.context.round_number}, which this client "
                    "has already begun: expected a new round"
                )
    return Member(invitation=invitation)


def _stored(vault: ClientVault) -> Member:
    if (stored := vault.load()) is None:
        raise ProtocolError(
            "this client has no keys of the round: it got no invitation, or its SuperNode "
            "lost the keys at a restart; to keep keys, name a state-folder in the node config"
        )
    return Member.from_bytes(stored)
