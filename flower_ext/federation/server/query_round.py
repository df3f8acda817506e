"""Rounds without training: queries and evaluations.

A query releases one noised sum of the clients' vectors. An evaluation is either such a query, or a
round in which each client reports its scores.
"""

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict
from logging import getLogger

import numpy as np
from flwr.app import ConfigRecord, Message

from flower_ext.errors import InvalidValue
from flower_ext.federation.messages import records
from flower_ext.federation.messages.exchange import Content, Requests
from flower_ext.federation.messages.replies import read_scores
from flower_ext.federation.population import Cohort
from flower_ext.federation.server.connection import leave_out_withdrawn
from flower_ext.federation.server.round import Round, reserve
from flower_ext.federation.server.run import Run
from flower_ext.federation.sums.masked import MaskedSum
from flower_ext.federation.sums.summation import Opening
from flower_ext.privacy import BudgetExhausted, VectorQuery, seeded_generator
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.noised_sum import QuerySum

log = getLogger("flwr")

_DRAWS = 1000
"""Number of draws of noise from which a standard error is computed, within some 2 %."""

VECTOR = "vector"
"""Name of the only array in a client's contribution."""


def _evaluation_content(run: Run, model: records.Arrays, config: ConfigRecord) -> Content:
    return {records.MODEL: records.to_record(model), records.CONFIG: config, **use_records(run)}


def use_records(run: Run) -> dict[str, ConfigRecord]:
    """Return the message records that, with the shared model, determine a client's own model."""
    last, trainings = max(1, run.participations.rounds), run.method.evaluation_training
    return {
        records.ROUND: run.round_record(last, training_loss=run.options.training_loss),
        **records.training_records({phase: t.in_round(last) for phase, t in trainings.items()}),
    }


class QueryRound:
    """One round in which all clients answer a query of the plan."""

    def __init__(self, run: Run, server_round: int, mechanism: QuerySum) -> None:
        self._run, self._mechanism, self._server_round = run, mechanism, server_round
        self._number = run.participations.answers[mechanism.query.name] + 1
        self._round: Round | None = None

    def ask(self, model: records.Arrays, config: ConfigRecord) -> Iterable[Message]:
        """Record the privacy cost on disk, let clients agree on masks, and return the messages.

        Return no messages if the budget does not permit an answer, or if too few clients are left.
        """
        run, query, number = self._run, self._mechanism.query, self._number
        server_round = self._server_round
        try:
            reserve(run, server_round, self._participations_after, self._mechanism)
        except BudgetExhausted as reason:
            log.warning("no %s after round %d: %s", query.name, server_round, reason)
            return []
        # Count before asking any client: from here on, clients may have sent their vectors.
        run.checkpoints.begin_query(query.name, number)
        self._mechanism.count_answer(run.participations)
        clients = [*run.clients.nodes]
        opening = Opening(
            clients=run.clients,
            population=run.population,
            cohort=Cohort(partitions=clients, units=clients, population=len(clients)),
            number=number,
            server_round=server_round,
            noise=run.options.noise("query-noise", query.name, number),
            model={VECTOR: np.zeros(query.size)},
        )
        opened = self._round = Round("evaluate", MaskedSum(self._mechanism), opening, run.spending)
        if not opened.cohort.partitions:
            self.close([])
            self._round = None  # closed
            return []
        protection = self._mechanism.client_protection(self._mechanism.num_members)
        last = max(1, run.participations.rounds)
        shared = {
            **_evaluation_content(run, model, config),
            records.ROUND: run.round_record(last, protection=protection, query=number),
            records.QUERY: ConfigRecord({"name": query.name, "fields": json.dumps(asdict(query))}),
        }
        return opened.ask(dict.fromkeys(opened.cohort.partitions, shared))

    def _participations_after(self) -> Participations:
        after = deepcopy(self._run.participations)
        self._mechanism.count_answer(after)
        return after

    def close(self, replies: Iterable[Message]) -> Mapping[str, float]:
        """Unmask the sum and return the query's answer; empty if the round is discarded."""
        if self._round is None:  # no client was asked
            return {}
        size, query = self._mechanism.num_members, self._mechanism.query
        released = self._round.close(replies, cohort=size, of=query.name)
        if released is None:
            reason, number = self._round.discard_reason, self._server_round
            log.warning("no %s after round %d: %s", query.name, number, reason)
            return {}
        total = np.asarray(released.value[VECTOR]) * size
        # The server adds the noise shares of silent clients, so every sum has the same number of
        # shares.
        stddev = self._mechanism.client_noise_stddev(size) * size**0.5
        answer = query.answer(total, stddev)
        self._run.progress.row |= answer | standard_errors(query, answer, total, stddev)
        self._run.answers[query.name] = answer
        return answer


def standard_errors(
    query: VectorQuery, answer: Mapping[str, float], total: np.ndarray, stddev: float
) -> dict[str, float]:
    """Return the standard error that noise gives to each number ``x`` of an answer, as ``x_error``.

    The result is empty if the answer has errors of its own. A number that is missing from the
    answer under some draws of noise has no standard error.
    """
    if any(f"{name}_error" in answer for name in answer):
        return {}
    # See how far new noise moves the numbers. This noise protects nobody, so a seed is safe.
    rng = seeded_generator(0, "standard errors")
    try:
        moved = [
            query.answer(total + stddev * rng.standard_normal(query.size), stddev)
            for _ in range(_DRAWS if answer else 0)
        ]
    except Exception:  # an answer need not exist for every total
        return {}
    return {
        f"{name}_error": float(np.std([numbers[name] for numbers in moved]))
        for name in answer
        if all(name in numbers for numbers in moved) and not name.endswith("_error")
    }


class ReportedScores:
    """An evaluation in which each client reports its scores, without noise."""

    def __init__(self, run: Run, server_round: int) -> None:
        self._run, self._server_round = run, server_round
        self.requests: Requests | None = None
        """The messages to all clients; None before `ask`."""

    def ask(self, model: records.Arrays, config: ConfigRecord) -> Iterable[Message]:
        """Return a message for every client."""
        leave_out_withdrawn(self._run)
        content = _evaluation_content(self._run, model, config)
        everyone = dict.fromkeys(self._run.clients.nodes, content)
        self.requests = self._run.clients.request("evaluate", everyone, self._server_round)
        return self.requests.messages

    def close(self, replies: Iterable[Message]) -> dict[str, float]:
        """Return statistics over clients (see `Progress.scores`); empty if nobody sent scores."""
        run = self._run
        assert self.requests is not None
        replied = sorted(self.requests.accepted(replies, read_scores))
        scores = {p: scores for p, scores in replied if scores.get("num-examples") != 0}
        if not scores:
            return {}
        run.client_metrics = scores
        return run.progress.scores(scores.values())


def evaluation(run: Run, server_round: int) -> ReportedScores | QueryRound:
    """Return the evaluation after a round, of the kind that the plan asks for.

    Refuse a run that asks for losses on training records if the plan evaluates by a noised sum.
    """
    scores = [each for each in run.query_sums if each.query.schedule == "in evaluations"]
    if not scores:
        return ReportedScores(run, server_round)
    if run.options.training_loss:
        raise InvalidValue(
            f"training_loss=True with {type(scores[0].query).__name__} in the plan: expected "
            "False; to release losses, name 'training_loss' with its bounds in SecureScores"
        )
    return QueryRound(run, server_round, scores[0])
