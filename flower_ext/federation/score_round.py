"""An evaluation: scores that clients report, or a round whose contributions are their scores."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from logging import getLogger

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation.exchange import Content
from flower_ext.federation.population import Cohort
from flower_ext.federation.protection import to_facts
from flower_ext.federation.round import Round, in_round, training_contents
from flower_ext.federation.run import Run
from flower_ext.federation.sums.masked import MaskedSum
from flower_ext.federation.sums.summation import Opening
from flower_ext.privacy import BudgetExhausted, ReleasePlan
from flower_ext.privacy.randomness import derived_seed

log = getLogger("flwr")

VECTOR = "scores"
"""Name of the only array in a client's contribution to a sum of scores."""


def query_records(run: Run) -> dict[str, ConfigRecord]:
    """Return the records of an evaluation besides the model and the user's own configuration.

    A client needs them to derive the model that it would use from the shared one.
    """
    last = max(1, run.participations.rounds)
    return {
        records.ROUND: run.round_record(last, **{"training-loss": run.training_loss}),
        **records.training_records(in_round(run.method.evaluation_training, last)),
    }


def noised_scores(run: Run) -> ReleasePlan | None:
    """Return the run's plan if it releases scores as noised sums, else None.

    Raises
    ------
    InvalidValue
        The run asks for losses on training records besides.
    """
    plan = run.mechanism
    if not isinstance(plan, ReleasePlan) or plan.scores is None:
        return None
    if run.training_loss:
        raise InvalidValue(
            "training_loss=True with scores in the plan: expected False; name 'training_loss' "
            "with its bounds in SecureScores"
        )
    return plan


class ReportedScores:
    """An evaluation in which each client reports its scores, without noise.

    Parameters
    ----------
    run : Run
    server_round : int
    """

    def __init__(self, run: Run, server_round: int) -> None:
        self._run, self._server_round = run, server_round

    def ask(self, grid: Grid, model: records.Arrays, config: ConfigRecord) -> Iterable[Message]:
        """Return a message for every client."""
        content = _content(self._run, model, config)
        everyone = dict.fromkeys(self._run.exchange.nodes, content)
        return self._run.exchange.ask("evaluate", everyone, self._server_round)

    def close(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Return mean, worst tenth, spread and Jain's index over clients, which all count alike."""
        run = self._run
        scores = run.exchange.accepted(
            "evaluate", self._server_round, replies, list(run.exchange.nodes), records.read_scores
        )
        scores = {p: s for p, s in scores.items() if s.get("num-examples") != 0}
        if not scores:
            return None
        run.client_metrics = scores
        return records.metrics_record(run.progress.scores(scores.values()))


class SummedScores:
    """An evaluation whose scores are released as one noised sum over all clients.

    Parameters
    ----------
    run : Run
    server_round : int
    plan : ReleasePlan
        A plan with ``scores``.
    """

    def __init__(self, run: Run, server_round: int, plan: ReleasePlan) -> None:
        assert plan.scores is not None
        assert plan.of_scores is not None
        self._run, self._plan = run, plan
        self._scores, self._mechanism = plan.scores, plan.of_scores
        self._number = run.participations.evaluations + 1
        self._round = Round("evaluate", server_round, exchange=run.exchange, spending=run.spending)

    def ask(self, grid: Grid, model: records.Arrays, config: ConfigRecord) -> Iterable[Message]:
        """Store the spend durably, let all clients agree on masks, and ask for masked scores."""
        run, number, server_round = self._run, self._number, self._round.server_round
        try:
            ahead = deepcopy(run.participations)
            self._plan.count_scores(ahead)
            run.check_spending(server_round, ahead, scores=True)
            same = derived_seed(run.seed or 0, "scores", run.checkpoints.run_id, number)
            release = self._mechanism.release
            run.spending.reserve(release, server_round, same if run.repeats else None)
        except BudgetExhausted as reason:
            log.warning("no evaluation after round %d: %s", server_round, reason)
            return []
        run.checkpoints.evaluating(number)
        self._plan.count_scores(run.participations)
        nodes = [*run.exchange.nodes]
        opening = Opening(
            clients=run.clients(grid),
            population=run.population,
            cohort=Cohort(asked=nodes, units=nodes, population=len(nodes)),
            number=number,
            server_round=server_round,
            noise=run.noise("score-noise", number),
            like={VECTOR: np.zeros(1 + len(self._scores.bounds))},
            read=_read_nothing,
        )
        cohort = self._round.open(MaskedSum(self._mechanism), opening)
        if not cohort.asked:
            self.close([])
            return []
        shared = {**_content(run, model, config), **self._query()}
        contents = training_contents(cohort, shared, {}, slow={}, request=self._round.request)
        return self._round.ask(contents)

    def close(self, replies: Iterable[Message]) -> MetricRecord | None:
        """Unmask the sum of scores; return its means, each with the standard error due to noise."""
        size = self._mechanism.cohort_size
        released, _ = self._round.close(replies, cohort=size, of="scores")
        if released is None:
            reason, number = self._round.discard_reason, self._round.server_round
            log.warning("no scores after round %d: %s", number, reason)
            return None
        total = np.asarray(released.value[VECTOR]) * size
        # The server adds the noise shares of silent clients, so every sum has as many shares.
        stddev = self._mechanism.cells_protection.share_stddev * size**0.5
        means = self._scores.means(total, stddev)
        self._run.progress.row |= means
        return records.metrics_record(means) if means else None

    def _query(self) -> Content:
        run, scores = self._run, self._scores
        protection = to_facts(self._mechanism.cells_protection, seeded_noise=run.seeded_noise)
        last = max(1, run.participations.rounds)
        return {
            records.ROUND: run.round_record(last, **protection, evaluation=self._number),
            records.SCORES: ConfigRecord(
                {
                    "names": [*scores.names],
                    "low": [float(low) for _, low, _ in scores.bounds],
                    "high": [float(high) for *_, high in scores.bounds],
                }
            ),
        }


def evaluation(run: Run, server_round: int) -> ReportedScores | SummedScores:
    """Return the evaluation after a round, of the kind that the plan asks for."""
    plan = noised_scores(run)
    if plan is None:
        return ReportedScores(run, server_round)
    return SummedScores(run, server_round, plan)


def _content(run: Run, model: records.Arrays, config: ConfigRecord) -> Content:
    return {
        records.MODEL: records.to_record(model),
        records.CONFIG: config,
        **query_records(run),
    }


def _read_nothing(reply: Message) -> records.Update:
    raise records.RefusedReply("scores in the clear: expected masked ones")
