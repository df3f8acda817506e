"""Evaluation on all clients: scores that each client reports, or means from noised secure sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_ext.errors import InvalidValue
from flower_ext.federation import records, rounds
from flower_ext.federation.exchange import Content
from flower_ext.federation.hooks import MethodHooks
from flower_ext.federation.protection import to_facts
from flower_ext.federation.secure_sum import SecureRound
from flower_ext.privacy import BudgetExhausted, ReleasePlan
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.plan import RoundDiscarded
from flower_ext.privacy.randomness import derived_seed

log = getLogger("flwr")

VECTOR = "scores"
"""Name of the only array in a client's part of a sum of scores."""


class Evaluating(MethodHooks):
    """The evaluations of a run. The plan may release their scores as noised sums."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._scoring: SecureRound | None = None
        if self._scores_plan is not None and self.training_loss:
            raise InvalidValue(
                "training_loss=True with scores in the plan: expected False; name 'training_loss' "
                "with its bounds in SecureScores"
            )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client for scores, in rounds that evaluate and in the last round."""
        if self.evaluate_every == 0:
            return []
        if server_round % self.evaluate_every and server_round != self._last_round:
            return []
        self._meet(grid)
        content: Content = {
            records.MODEL: records.to_record(records.shared_arrays(self.shared(arrays))),
            records.CONFIG: ConfigRecord({**config, "server-round": server_round}),
            **self.evaluation_records(),
        }
        if self._scores_plan is not None:
            return self._ask_for_sum(self._scores_plan, server_round, content, grid)
        everyone = dict.fromkeys(self.exchange.nodes, content)
        return self.exchange.ask("evaluate", everyone, server_round)

    def evaluation_records(self) -> dict[str, ConfigRecord]:
        """Return the records of an evaluation besides the model and the user's own configuration.

        A client needs them to derive the model that it would use from the shared one.
        """
        last = max(1, self.participations.rounds)
        return {
            records.ROUND: self._facts(last, {"training-loss": self.training_loss}),
            **records.training_records(rounds.in_round(self.evaluation_training, last)),
        }

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return mean, worst tenth, spread and Jain's index over clients, which all count alike.

        If scores are summed under noise, return their means only, each with the standard error due
        to noise.
        """
        if self._scores_plan is not None:
            return self._noised_means(self._scores_plan, server_round, replies)
        scores = self.exchange.accepted(
            "evaluate", server_round, replies, list(self.exchange.nodes), records.read_scores
        )
        scores = {p: s for p, s in scores.items() if s.get("num-examples") != 0}
        if not scores:
            return None
        self.client_metrics = scores
        return records.metrics_record(self.progress.scores(scores.values()))

    def count_evaluation(self) -> None:
        """Count an evaluation of all clients, when the server asks for it."""
        if self._scores_plan is not None:
            self._scores_plan.count_scores(self.participations)

    @property
    def _scores_plan(self) -> ReleasePlan | None:
        """The run's plan if it releases scores as noised sums, else None."""
        plan = self.accounted
        return plan if isinstance(plan, ReleasePlan) and plan.scores is not None else None

    def _ask_for_sum(
        self, plan: ReleasePlan, server_round: int, content: Content, grid: Grid
    ) -> Iterable[Message]:
        """Store the spend durably, let all clients agree on masks, and ask for masked scores."""
        own, scores, number = plan.of_scores, plan.scores, self.participations.evaluations + 1
        assert own is not None
        assert scores is not None
        self._scoring = None
        same = derived_seed(self.seed or 0, "scores", self.checkpoints.run_id, number)
        try:
            ahead = deepcopy(self.participations)
            plan.count_scores(ahead)
            self._check_spending(server_round, ahead, scores=True)
            self.spending.reserve(own.release, server_round, same if self.repeats else None)
        except BudgetExhausted as reason:
            log.warning("no evaluation after round %d: %s", server_round, reason)
            return []
        self.checkpoints.evaluating(number)
        self.count_evaluation()
        try:
            summing = SecureRound(
                own,
                self.exchange.nodes,
                exchange=self.exchange,
                grid=grid,
                number=number,
                server_round=server_round,
                noise=self._noise("score-noise", number),
                like={VECTOR: np.zeros(1 + len(scores.bounds))},
            )
            asked = summing.agree()
        except RoundDiscarded as reason:
            self._discard_scores(server_round, reason)
            return []
        self._scoring = summing
        protection = to_facts(own.cells_protection, seeded_noise=self.seeded_noise)
        told: Content = {
            **content,
            records.ROUND: self._facts(
                max(1, self.participations.rounds), {**protection, "evaluation": number}
            ),
            records.SCORES: ConfigRecord(
                {
                    "names": [*scores.names],
                    "low": [float(low) for _, low, _ in scores.bounds],
                    "high": [float(high) for *_, high in scores.bounds],
                }
            ),
        }
        contents = {partition: {**told, **summing.own(partition)} for partition in asked}
        return self.exchange.ask("evaluate", contents, server_round)

    def _noised_means(
        self, plan: ReleasePlan, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Unmask the sum of scores and return its means."""
        own, scores, summing = plan.of_scores, plan.scores, self._scoring
        assert own is not None
        assert scores is not None
        assert summing is not None
        heard = self.exchange.heard(
            "evaluate", server_round, replies, list(self.exchange.nodes), summing.read
        )
        with self.spending.closing() as release:
            try:
                found = summing.combine(heard)
            except RoundDiscarded as reason:
                log.warning("no scores after round %d: %s", server_round, reason)
                release.discard(str(reason))
                return None
            release.note(
                cohort=own.cohort_size,
                answered=found.answered,
                topped_up_stddev=found.topped_up_stddev,
                of="scores",
            )
        total = np.asarray(found.value[VECTOR]) * own.cohort_size
        # The server adds the noise shares of silent clients, so every sum has as many shares.
        stddev = own.cells_protection.share_stddev * own.cohort_size**0.5
        means = scores.means(total, stddev)
        self.progress.row |= means
        return records.metrics_record(means) if means else None

    def _discard_scores(self, server_round: int, reason: RoundDiscarded) -> None:
        log.warning("no scores after round %d: %s", server_round, reason)
        with self.spending.closing() as release:
            release.discard(str(reason))

    def _meet(self, grid: Grid) -> None:
        """Connect to the clients, at the first call."""
        raise NotImplementedError

    def _facts(self, training_round: int, more: Mapping[str, float]) -> ConfigRecord:
        own: dict[str, float | str] = {
            "run": self.checkpoints.run_id,
            "number": training_round,
            "seed": self.seed or 0,
            "diagnostics": self.diagnostics,
        }
        return ConfigRecord({**own, **more})

    def _check_spending(
        self, server_round: int, ahead: Participations, *, scores: bool = False
    ) -> None:
        """Refuse a release that would bring the provable ε above the budget."""
        run = self.checkpoints.run
        self.spending.check(
            self.accounted,
            server_round,
            replace(self.run_facts, participations=ahead),
            self.claims,
            repeatable=self.repeats,
            run_id=self.checkpoints.run_id,
            method=type(self).__name__,
            name="" if run is None else run.path.name,
            scores=scores,
        )
