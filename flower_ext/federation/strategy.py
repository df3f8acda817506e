"""The shared Strategy: cohort → configure → validate → bound, noise, ledger → aggregate → metrics.

A method adds the phases of its local training and its client functions. Everything that a
guarantee rests on happens here, once, and is taken from one frozen plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from logging import getLogger
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flower_ext.errors import InvalidValue
from flower_ext.federation import records, rounds
from flower_ext.federation._flower_private import in_simulation
from flower_ext.federation.cohort import refuse_foreign
from flower_ext.federation.exchange import Content
from flower_ext.federation.hooks import MethodHooks
from flower_ext.federation.population import Cohort
from flower_ext.federation.protection import to_facts
from flower_ext.federation.secure_sum import SecureRound
from flower_ext.federation.state.checkpoint import Asked as AskedUnits
from flower_ext.federation.uploads import Asked
from flower_ext.privacy import (
    Guarantee,
    secure_generator,
)
from flower_ext.privacy.ledger import Reservation
from flower_ext.privacy.noised_sum import NoisedSum
from flower_ext.privacy.plan import RoundDiscarded
from flower_ext.privacy.randomness import derived_seed

log = getLogger("flwr")


class FederatedStrategy(MethodHooks):
    """Base of every method: subclass it, name the client side, list the training phases.

    What a method may fill in beyond that is in `MethodHooks`.

    Parameters
    ----------
    plan : PrivacyPlan
        What is sampled, clipped, noised and accounted.
    personal : Sequence[str]
        Names of modules that never leave the client; dropped from the initial arrays. ``*`` stands
        for any part of a name, as in ``"*.classifier"``.
    server_learning_rate : float
        Factor on the averaged update.
    stragglers : Stragglers, optional
        Simulated devices that complete only some of their local epochs.
    seed : int, optional
        Reproducible initial models and batches; cohorts too, but under a `ReleasePlan` with secure
        noise, whose ε rests on their being secret: these come from the operating system's
        randomness. Without a seed cohorts, stragglers and noise all come from there; clients'
        initial personal parts and the order of their batches, which are no secret, are then those
        of seed 0: give other seeds to vary them.
    seeded_noise : bool
        Reproducible noise from ``seed``; for simulation only, and the guarantee says so.
    evaluate_every : int
        Rounds between evaluations on all clients, besides the last; 0 never asks a client to
        evaluate. What clients report there is not covered by any guarantee.
    training_loss : bool
        Clients also report the loss of the model that they would use on their training examples,
        whose variance over clients is a measure of fairness. Not covered either.
    diagnostics : bool
        Clients report the norm of their update before clipping, un-noised. Not covered either.
    timeout : float
        Seconds to wait for nodes to connect, and for replies.
    ledger : Ledger, optional
        Durable record of every release of a `ReleasePlan`; stops the run at its budget.
    budget : Budget, optional
        Stops the run before a round with which its provable ε would exceed it, whatever the plan;
        with ``Budget(ledger=...)`` that of all runs on the same population. Under a
        `NonPrivatePlan` such an account says that no ε covers the run.
    run : RunDirectory, optional
        Where metrics and checkpoints go; if it was resumed, ``start`` goes on from the last one.
    population : Population, optional
        Who is asked, and who counts; by default the clients that the plan's sampling draws.
    exposed : Sequence[str]
        What else shows anything of the clients' data, before the run or beside it, in a line each:
        the guarantees list it as not covered.
    frozen : str
        Fingerprint of what no client trains (`Task.fingerprint`): every node has that part from its
        own copy of the base model, and one with another copy is refused before the first round.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, make the spend durable, and ask.

        Cohorts, stragglers, batches and learning rates are numbered by training rounds, so that a
        strategy which trains in some rounds only does there what it would do alone.

        Raises
        ------
        BudgetExhausted
            This round would exceed the budget; nothing was sent.
        """
        self.connect(grid, arrays)
        number = self.next_training
        secret = self.accounted.release is not None and not self.repeats  # ε rests on it
        drawn = self.population.draw(
            secure_generator() if secret else self._generator("cohort", number)
        )
        self._check_budget(server_round, drawn)
        if number - 1 == self.accounted.planned_rounds:
            log.warning(
                "training round %d is beyond the %d of the plan: ε grows past what its noise was "
                "chosen for (budget= would end the run)",
                number,
                number - 1,
            )
        self.cohort = self.begin_round(number, drawn, grid)
        self.secure_round = self._agree(number, server_round, grid)
        slow: dict[int, float] = {}
        if self.stragglers is not None:
            self.stragglers.check(self.training.values())
            rng = self._generator("stragglers", number)
            slow = self.stragglers.draw(self.cohort.asked, self.population.num_nodes, rng)
        self.check_training()
        protection = self._protection()
        shared: Content = {
            records.MODEL: records.to_record(self.sent),
            records.ROUND: self._facts(number, protection),
            records.SETTINGS: ConfigRecord(dict(self.settings)),
            records.CONFIG: config,
            **self.server_state(),
        }
        contents = rounds.training_contents(
            self.cohort,
            shared,
            rounds.in_round(self.training, number),
            slow=slow,
            own=self._own_records if self.secure_round else self.client_state,
        )
        if self.client.mirrored:
            contents = rounds.with_remembered(
                contents,
                self.remembered,
                lambda last: self._facts(number, {**protection, "remembered": last}),
            )
        who, how_many = list(self.cohort.units), len(self.cohort.asked)
        same = derived_seed(self.seed or 0, "release", self.checkpoints.run_id, number)
        self.spending.reserve(self.accounted.release, server_round, same if self.repeats else None)
        counts = (how_many, None) if self.secure_round is None else self.secure_round.counts
        self.checkpoints.asked(AskedUnits(number, who, *counts))
        self.progress.row["cohort"] = how_many
        asked = self.exchange.ask("train", contents, server_round)
        return Asked(asked, self.accounted) if self.only_adds else asked

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse what is malformed; bound and add up the rest as it comes, and noise the sum."""
        updates = rounds.Updates(
            self.exchange.heard(
                "train",
                server_round,
                replies,
                self.cohort.asked,
                self.read_update if self.secure_round is None else self.secure_round.read,
            ),
            kept=self.needs_each_update,
        )
        with self.spending.closing() as release:
            mean = self._aggregate(updates, server_round, release)
        row, told = self.progress.row, updates.told
        counts = (len(self.cohort.asked), len(told))
        if self.secure_round is not None:
            counts = self.secure_round.seen
        self.checkpoints.answered(counts[1])
        self.population.count(replace(self.cohort, asked=range(counts[0])), counts[1])
        row["answered"] = len(told)
        self._ever_answered |= bool(told)
        row |= rounds.norm_columns(told.values())
        for partition, metrics in told.items():  # the smallest told: none makes ε look smaller
            if "num-examples" in metrics:
                size = int(metrics["num-examples"])
                self.num_examples[partition] = min(size, self.num_examples.get(partition, size))
        if self.client.keeps_memory and not (self.client.mirrored and mean is None):
            self.remembered |= dict.fromkeys(told, self.participations.rounds)
        if mean is None:
            return None, records.metrics_record(row)
        released_only = self.accounted.release is not None  # nothing else may show in the model
        moved = self.next_model(self.sent, mean, {} if released_only else updates.each)
        moved = {name: moved[name].astype(base.dtype) for name, base in self.sent.items()}
        return records.to_record(moved), records.metrics_record(row)

    def _aggregate(
        self, updates: rounds.Updates, server_round: int, release: Reservation
    ) -> records.Arrays | None:
        try:
            if self._too_few:
                raise RoundDiscarded(self._too_few)
            summed = self.combine if self.secure_round is None else self.secure_round.combine
            aggregate = summed(updates)
        except RoundDiscarded as reason:
            log.warning("round %d discarded: %s", server_round, reason)
            self.progress.row["discarded"] = 1
            release.discard(str(reason))
            return None
        finally:
            updates.hear_out()
        facts = {"answered": aggregate.answered, "topped_up_stddev": aggregate.topped_up_stddev}
        self.progress.row |= facts
        release.note(cohort=len(self.cohort.asked), **facts)
        return dict(aggregate.value)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client, in the rounds that evaluate and in the last."""
        if self.evaluate_every == 0:
            return []
        if server_round % self.evaluate_every and server_round != self._last_round:
            return []
        self._meet(grid)
        content: Content = {
            records.MODEL: records.to_record(records.shared_arrays(self.shared(arrays))),
            records.CONFIG: config,
            **self.evaluation_records(),
        }
        everyone = dict.fromkeys(self.exchange.nodes, content)
        return self.exchange.ask("evaluate", everyone, server_round)

    def evaluation_records(self) -> dict[str, ConfigRecord]:
        """Return what an evaluation tells every client besides the model, but for the user's own.

        With it a client makes the model that it would use of the shared one.
        """
        last = max(1, self.participations.rounds)
        return {
            records.ROUND: self._facts(last, {"training-loss": self.training_loss}),
            **records.training_records(rounds.in_round(self.evaluation_training, last)),
        }

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Every client counts alike: mean, worst tenth, spread and Jain's index."""
        scores = self.exchange.accepted(
            "evaluate", server_round, replies, list(self.exchange.nodes), records.read_scores
        )
        scores = {p: s for p, s in scores.items() if s.get("num-examples") != 0}
        if not scores:
            return None
        self.client_metrics = scores
        return records.metrics_record(self.progress.scores(scores.values()))

    def guarantees(self) -> list[Guarantee]:
        """What protects people after the rounds so far: published claim and provable ones.

        The provable ones use the participations of this very run, which depend on nobody's data.
        """
        return self.claims(self.run_facts) if self.participations.rounds else []

    def spent(self) -> dict[str, float]:
        """ε so far, for the log and the report's figures."""
        run = self.run_facts
        spent = self.accounted.spent(run)
        if spent and self.accounted.delta is not None:
            spent["delta"] = self.accounted.delta
        if self.accounted.release is not None:  # else the plan knows what is published
            for one in self.claims(run):
                if one.basis == "published":
                    spent["epsilon_published"] = one.epsilon
        return spent

    def _protection(self) -> dict[str, Any]:
        """What the round tells a client of how to protect its upload."""
        asked = self.accounted.protection(self.run_facts, len(self.cohort.asked))
        facts = to_facts(asked, seeded_noise=self.seeded_noise)
        return {"report-size": True, **facts} if self.accounted.tells_sizes else facts

    def connect(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Take ``arrays`` as the model that is sent; meet the clients, the first time."""
        self.sent = records.shared_arrays(self.shared(arrays))
        self._meet(grid)

    def _meet(self, grid: Grid) -> None:
        if self._met:
            return
        by_clients = self.accounted.client_protects
        mod = self.any_client_app and by_clients and self.accounted.release is not None
        roster = self.exchange.connect(grid, self.population.num_nodes, mods=mod)
        secure = isinstance(self.accounted, NoisedSum) and self.accounted.secure_aggregation
        if roster.foreign and secure:
            raise InvalidValue(
                "secure_aggregation: expected None, as the nodes' ClientApp is not one of this "
                "package and cannot mask its uploads; build it by client_app(task)"
            )
        if roster.foreign:
            refuse_foreign(
                type(self).__name__,
                roster.said,
                any_client_app=self.any_client_app,
                client_protects=by_clients and not roster.protects,
                mod=mod,
            )
        if self.frozen and not roster.foreign:
            self._check_frozen(grid)
        self.prepare(grid)
        if self.accounted.needs_sizes and self.budget is not None:
            self._ask_sizes(grid)
        self._met = True

    def _check_frozen(self, grid: Grid) -> None:
        """Ask nodes whether they have the base model that the server has; simulated ones do."""
        nodes = [*self.exchange.nodes]
        content = {records.FROZEN: ConfigRecord({"fingerprint": self.frozen})}
        asked = dict.fromkeys(nodes[:1] if in_simulation() else nodes, content)
        self.exchange.query(grid, asked, records.read_answer)

    def _ask_sizes(self, grid: Grid) -> None:
        """Learn what else the first upload tells: only with it is a round's ε known beforehand."""
        content = {records.ROUND: self._facts(0, {"report-size": True})}
        everyone = dict.fromkeys(self.exchange.nodes, content)
        told = self.exchange.query(grid, everyone, records.read_answer)
        self.num_examples |= {p: int(answer["num-examples"]) for p, answer in told.items()}

    def check_training(self) -> None:
        """Refuse local training that the plan does not speak of, as every round does.

        Raises
        ------
        ValueError
            Names the setting and what the plan expects.
        """
        self.accounted.check_training(self.run_facts)

    def _agree(self, number: int, server_round: int, grid: Grid) -> SecureRound | None:
        """Let the cohort agree on masks where the plan sums securely; lose those who do not."""
        self._too_few, plan = "", self.accounted
        if not isinstance(plan, NoisedSum) or plan.secure_aggregation is None:
            return None
        try:
            found = SecureRound(
                plan,
                self.cohort.asked,
                exchange=self.exchange,
                grid=grid,
                number=number,
                server_round=server_round,
                noise=self._noise("server-noise", number),
                like=self.sent,
            )
            asked = found.agree()
        except RoundDiscarded as reason:  # nobody trains
            found, asked, self._too_few = None, [], str(reason)
        self.cohort = replace(self.cohort, asked=asked)
        return found

    def _own_records(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return what one client alone is sent, of a secure sum as well."""
        assert self.secure_round is not None
        return {**self.client_state(partition), **self.secure_round.own(partition)}

    def _check_budget(self, server_round: int, cohort: Cohort) -> None:
        """Refuse a round with which the provable ε would exceed the budget."""
        if self.budget is None:
            return
        ahead = deepcopy(self.population)
        ahead.count(cohort, len(cohort.asked))
        run = self.checkpoints.run
        self.spending.check(
            self.accounted,
            server_round,
            replace(self.run_facts, participations=ahead.participations),
            self.claims,
            repeatable=self.repeats,
            run_id=self.checkpoints.run_id,
            method=type(self).__name__,
            name="" if run is None else run.path.name,
        )

    def _facts(self, training_round: int, more: Mapping[str, float]) -> ConfigRecord:
        own: dict[str, float | str] = {
            "run": self.checkpoints.run_id,
            "number": training_round,
            "seed": self.seed or 0,
            "diagnostics": self.diagnostics,
        }
        return ConfigRecord({**own, **more})
