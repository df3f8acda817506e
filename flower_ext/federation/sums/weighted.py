"""Weighted sums: the update of user u in silo s has the weight n_su / N_u, which no party learns.

n_su is the number of records of user u in silo s, and N_u is the sum of n_su over all silos.

This module has the server's end of a sum, and the names in the messages; `weighted_silo` has the
silo's end. A `WeightingProtocol` of `flower_ext.secure.weighting` computes the contents of all
messages as bytes. It is Protocol 1 of Kato et al., "Uldp-FL" (PVLDB 2024), over Paillier, or the
protocol of a plug-in.

=========  =========================================  ============================================
stage      message of the server                      answer of a silo
=========  =========================================  ============================================
set-up     a question for each `ProtocolStep`         the answer to that step
(draw)     an offer, to silo 0                        the silos' choices, unreadable to the server
training   the request to train, with encrypted       its masked sum, or a notice of lost keys
           weights
=========  =========================================  ============================================

The stage (draw) exists only in protocols that draw the users of a round themselves. In all other
protocols, the silos number the users in an order that the server does not know, and the server
draws some of these numbers. Silos do not learn which users were drawn: a silo trains all its users,
and the encrypted weight of a user that was not drawn is zero. If a silo does not answer, the server
decrypts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, Message

from flower_ext.errors import FlowerExtError, IncompleteRound, InvalidValue, ProtocolError
from flower_ext.federation.messages import records
from flower_ext.federation.messages.exchange import Clients
from flower_ext.federation.messages.records import Arrays, bytes_record, shaped
from flower_ext.federation.messages.replies import RefusedReply, read_message, read_metrics
from flower_ext.federation.messages.roster import FederationNotReady
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy import AdversaryView, BudgetExhausted, FullParticipation
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum, refuse_spoiled
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundDiscarded, RoundMechanism
from flower_ext.privacy.mechanisms.updates import divided
from flower_ext.privacy.run_summary import MethodTraits
from flower_ext.secure.weighting.agreement import Dialogue
from flower_ext.secure.weighting.protocol import WeightingProtocol, load_protocol

if TYPE_CHECKING:  # it needs the extra ``weighting``
    from flower_ext.secure.weighting.server_party import ServerParty

T = TypeVar("T")
log = getLogger("flwr")

WEIGHTED_SUM = records.SUM + "weighted"
"""Name of the record of the server's messages."""
WEIGHTS, SUM, LOST = "weights", "sum", "lost"
"""Names of the only array in a message. The server sends `WEIGHTS` for a round. A silo replies with
its masked `SUM`, or with a notice that it has `LOST` its keys. In all other messages, and in their
answers, the array has the name of the protocol's step."""
_SPOILED_AT_FIRST = 3
"""A run ends if this many sums at its start are all spoiled. A sum is spoiled if it is too large to
be a sum of honest silos."""
_STATE, _COSTS = "sum.costs", ("sensitivity", "approximation_error")
"""Name of the only group in `state`; names of its numbers, which are fields of the mechanism."""


def weighted_sum(
    protocol: str | WeightingProtocol = "paillier",
) -> Callable[[RoundMechanism], WeightedSum]:
    """Return a value for the parameter ``sum`` of a `FederatedStrategy`.

    The strategy's method must be `UldpAvg` or `UldpSgd`. Each coordinate of a sum equals the same
    coordinate of a plain sum with ``UldpAvg(weighting="by-records")``, within the precision of
    ``protocol``. If a silo does not answer, the round is discarded.

    Parameters
    ----------
    protocol : str or WeightingProtocol
        Settings of a protocol, such as a `PrivateWeighting`. Or a name, for a protocol with default
        settings: ``"paillier"`` for `PrivateWeighting`, or the name of an installed plug-in.
    """
    settings = load_protocol(protocol)() if isinstance(protocol, str) else protocol
    return partial(WeightedSum, settings)


class WeightedSum(Summation):
    """Sums of users' updates over silos, under weights that no party learns.

    After the set-up, the guarantees of ``mechanism`` include the privacy loss that comes from the
    protocol, such as from rounding.
    """

    repeats = False  # a repeated round has new secret keys and new random numbers
    brings_weights = True
    mechanism: NoisedSum
    server: ServerParty[Any, Any]
    """The server's end of the protocol, from `connect` on."""

    def __init__(self, protocol: WeightingProtocol, mechanism: RoundMechanism) -> None:
        if not isinstance(mechanism, NoisedSum):
            raise InvalidValue(
                f"sum=weighted_sum(…) with a plan that makes a {type(mechanism).__name__}: "
                "expected a ReleasePlan for UldpAvg or UldpSgd"
            )
        if mechanism.secure_sum is not None:
            raise InvalidValue(
                "noise_placement=SecureSum(…) of the plan: expected 'client', because a weighted "
                "sum is a secure sum itself"
            )
        if mechanism.state:
            raise InvalidValue(
                "clipping_norm=AdaptiveClipping(…) with sum=weighted_sum(…): expected a number, "
                "because the silos set up their keys for one clipping norm"
            )
        super().__init__(mechanism)
        self.protocol = protocol
        self.secure_sum, self.hidden_draw = protocol.secure_sum, protocol.hidden_draw
        self.disclosures = protocol.disclosures
        self._num_silos = 0
        self.keys_lost = False
        """True if a silo may have lost its keys; the next round then begins with a new set-up."""
        self.spoiled: int | None = 0
        """Number of sums so far if all were spoiled; None after a sum that was not spoiled."""

    def check(self, method: MethodTraits, *, diagnostics: bool) -> None:
        """Require ``weighting="by-records"`` of the method, and a run without diagnostics."""
        if method.num_silos is None or method.weighting != "by-records":
            raise InvalidValue(
                f"sum=weighted_sum(…) with weighting={method.weighting!r}: expected "
                "UldpAvg(weighting='by-records'), because a weighted sum weights by records"
            )
        if diagnostics:
            raise InvalidValue(
                "diagnostics=True with sum=weighted_sum(…): expected False, because a weighted sum "
                "hides the updates, which diagnostics show"
            )
        self._num_silos = method.num_silos
        # Refuse settings that do not fit the plan before the server asks a silo.
        self.protocol.settings_of(self.mechanism, silos=self._num_silos, coordinates=1)

    def describe(self) -> str:
        """Return the protocol's settings for the log."""
        return f"private weighting: {self.protocol}"

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return the protocol's assumptions."""
        return self.protocol.assumptions(view)

    def connect(self, clients: Clients, model: Arrays) -> Mapping[str, float]:
        """Ask the silos to set up fresh keys and seeds, and to count their records."""
        started = time.monotonic()
        coordinates = sum(array.size for array in model.values())
        settings = self.protocol.settings_of(
            self.mechanism, silos=self._num_silos, coordinates=coordinates
        )
        self._raise_costs(settings.sensitivity, settings.approximation_error)
        server = self.protocol.server_type(settings)
        log.info(
            "private weighting: a silo sends %.1f MB per round",
            server.sum_type.size(settings) / 1e6,
        )
        _converse(server.set_up(), clients)
        self.server, self.keys_lost = server, False
        return {"setup_seconds": time.monotonic() - started}

    def check_round(self, number: int) -> None:
        """Refuse a round whose number is above the most rounds of the protocol's settings."""
        try:
            self.server.settings.check_round(number, number - 1)
        except ProtocolError as limit:
            raise BudgetExhausted(f"the weighted sum permits no more rounds: {limit}") from None

    def open(self, opening: Opening) -> OpenSum:
        """Encrypt the weights of the round's users.

        If a silo has lost its keys, all silos first set up new keys and a new secret order of the
        users.
        """
        is_hidden = self.hidden_draw is not None
        is_unnamed = is_hidden or isinstance(self.mechanism.sampling, FullParticipation)
        stage = "the new set-up"
        try:
            if self.keys_lost:
                self.connect(opening.clients, opening.model)
                opening.population.forget_order()
            stage, started = "the secret draw of users", time.monotonic()
            places = None if is_unnamed else opening.cohort.units
            dialogue = self.server.begin_round(opening.number, places)
            weights = _converse(dialogue, opening.clients)
        except FederationNotReady as missing:
            self.keys_lost = self.keys_lost or is_hidden
            raise RoundDiscarded(
                f"{stage} failed, because a silo gave no valid answer: {missing}"
            ) from missing
        return OpenWeightedSum(self, opening, weights, time.monotonic() - started)

    def state(self) -> Mapping[str, Arrays]:
        """Return the two numbers by which the protocol makes ε larger, for a checkpoint."""
        costs = {name: np.asarray(getattr(self.mechanism, name)) for name in _COSTS}
        return {_STATE: costs}

    def restore(self, state: Mapping[str, Arrays]) -> None:
        """Increase the mechanism's sensitivity and approximation error to at least ``state``."""
        self._raise_costs(*(float(state[_STATE][name]) for name in _COSTS))

    def _raise_costs(self, sensitivity: float, approximation_error: float) -> None:
        self.mechanism = replace(
            self.mechanism,
            sensitivity=max(sensitivity, self.mechanism.sensitivity),
            approximation_error=max(approximation_error, self.mechanism.approximation_error),
        )


class OpenWeightedSum(OpenSum):
    """The weighted sum of one round; the server has encrypted its weights."""

    def __init__(
        self, summation: WeightedSum, opening: Opening, weights: bytes, seconds: float
    ) -> None:
        super().__init__(summation.mechanism, opening)
        self._summation = summation
        self._weights = bytes_record(WEIGHTS, weights)
        self.measures = {"encryption_seconds": seconds}
        self._answered = 0
        self._lost: list[int] = []

    def request(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the encrypted weights, which are the same for all silos."""
        return {WEIGHTED_SUM: self._weights}

    def read(self, reply: Message) -> Update:
        """Keep a silo's masked sum until `close`, or note that the silo has lost its keys."""
        name, data = read_message(reply, SUM, LOST, record=records.UPDATE)
        if name == LOST and data != b"\0":
            raise RefusedReply(f"a notice of lost keys (array {LOST!r}): expected one zero byte")
        silo = self._opening.clients.partition_of(reply)
        if name == LOST:
            self._lost.append(silo)
            return Update({}, {})
        metrics = read_metrics(reply)
        self._summation.server.add_sum(silo, data)
        self._answered += 1
        return Update({}, metrics)

    def close(self) -> Aggregate:
        """Decrypt the sum over all silos, and release its mean.

        Raises
        ------
        RoundDiscarded
            A silo's sum is missing, a silo has lost its keys, or the sum is spoiled. A spoiled sum
            is too large for a sum of honest silos.
        FederationNotReady
            The first `_SPOILED_AT_FIRST` sums of the run were all spoiled.
        """
        if self._lost:
            self._summation.keys_lost = True
            raise RoundDiscarded(
                f"silos {sorted(self._lost)} have lost their keys, so nothing was decrypted, and "
                "all silos will set up new keys before the next round; to keep keys when a "
                "SuperNode restarts, name a state-folder in its node config"
            )
        started, summation = time.monotonic(), self._summation
        like, mechanism = self._like, summation.mechanism
        # Every user adds at most the clipping norm, plus the error of the encoding.
        norms = mechanism.sampling.population * (
            mechanism.sensitivity + mechanism.approximation_error
        )
        bound = norms * mechanism.clipping_norm
        try:
            total = shaped(summation.server.close_round(), like)
            refuse_spoiled(total, bound=bound, stddev=mechanism.noise_stddev)
        except IncompleteRound as missing:
            raise RoundDiscarded(f"{missing}; nothing was decrypted") from missing
        except OverflowError as error:
            raise self._discarding(f"{error}, or a silo sent bytes that are no sum") from error
        except RoundDiscarded as reason:
            raise self._discarding(str(reason)) from reason
        summation.spoiled = None
        mean = divided(total, mechanism.sampling.expected_cohort_size, like)
        self.measures = {**self.measures, "decryption_seconds": time.monotonic() - started}
        # The silos' shares of the noise are in the total, so the server adds none.
        return Aggregate(value=mean, answered=self._answered, topped_up_stddev=0.0)

    def _discarding(self, reason: str) -> RoundDiscarded | FederationNotReady:
        """Return the error for a spoiled sum, which ends the run if all sums were spoiled."""
        if self._summation.spoiled is not None:
            self._summation.spoiled += 1
            if self._summation.spoiled >= _SPOILED_AT_FIRST:
                return FederationNotReady(
                    f"the first {self._summation.spoiled} sums were all spoiled, so the run ends: "
                    "later sums would be spoiled as well, and each costs privacy. The last sum was "
                    f"discarded for this reason: {reason}"
                )
        return RoundDiscarded(reason)


def _converse(dialogue: Dialogue[T], clients: Clients) -> T:
    """Ask the silos for every step that a dialogue yields, and return the dialogue's result.

    Raise `FederationNotReady` if a silo does not answer, or if its answer breaks the protocol.
    """
    answers: Any = None
    while True:
        try:
            step = dialogue.send(answers)
        except StopIteration as end:
            result: T = end.value
            return result
        except Exception as error:  # bytes from outside may provoke any error
            if answers is None:
                raise  # no silo has answered yet
            reason = str(error) if isinstance(error, FlowerExtError) else repr(error)
            raise FederationNotReady(f"a silo's answer breaks the protocol: {reason}") from error
        contents = {
            silo: {WEIGHTED_SUM: bytes_record(step.name, question)}
            for silo, question in step.questions.items()
        }

        def read(reply: Message, name: str = step.name) -> bytes:
            return read_message(reply, name)[1]

        answers = clients.ask_all(contents, read)
