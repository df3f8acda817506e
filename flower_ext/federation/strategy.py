"""The strategy that all methods share: one round, from the draw of the cohort to the metrics.

A method adds the phases of its local training and its client functions. All steps that a guarantee
depends on are in this module, once, and follow one frozen plan.
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
from flower_ext.federation.evaluation import Evaluating
from flower_ext.federation.exchange import Content
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
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.plan import RoundDiscarded
from flower_ext.privacy.randomness import derived_seed

log = getLogger("flwr")

_ROUNDS_ALONE = "noised scores of evaluations: what is published speaks of training rounds alone"


class FederatedStrategy(Evaluating):
    """Base of every method: subclass it, name the client side, and list the training phases.

    `MethodHooks` has the further hooks that a method may override.

    Parameters
    ----------
    plan : PrivacyPlan
        Sampling, clipping, noise and accounting of the run.
    personal : Sequence[str]
        Names of modules that never leave the client; the server drops them from the initial
        arrays. ``*`` matches any part of a name, as in ``"*.classifier"``.
    server_learning_rate : float
        Factor on the averaged update.
    stragglers : Stragglers, optional
        Simulated devices that complete only some of their local epochs.
    seed : int, optional
        Makes initial models, batches and cohorts reproducible. Cohorts under a `ReleasePlan` with
        secure noise are an exception: its ε assumes that they are secret, so they always come from
        the operating system's randomness. Without a seed, cohorts, stragglers and noise all come
        from there. Clients' initial personal parts and the order of their batches, which are no
        secret, are then those of seed 0; give other seeds to vary them.
    seeded_noise : bool
        If True, noise follows ``seed``. Use it for simulation only; the guarantee says so.
    evaluate_every : int
        Number of rounds between evaluations on all clients; the last round is always evaluated.
        With 0, the server never asks a client to evaluate. If the plan has ``scores``, the server
        sees noised means, which ε counts. Otherwise no guarantee covers the reported scores.
    training_loss : bool
        If True, clients also report the loss on their training examples of the model that they
        would use. Its variance over clients measures fairness. No guarantee covers these losses.
    diagnostics : bool
        If True, clients report the norm of their update before clipping, without noise. No
        guarantee covers these norms.
    timeout : float
        Seconds to wait for nodes to connect, and for replies.
    ledger : Ledger, optional
        Durable record of every release of a `ReleasePlan`; the run stops at its budget.
    budget : Budget, optional
        The run stops before a round that would bring its provable ε above this budget, under any
        plan. With ``Budget(ledger=...)``, the budget is for all runs on the same population; the
        account of a run with a `NonPrivatePlan` then says that no ε covers it.
    run : RunDirectory, optional
        Directory for metrics and checkpoints. If it was resumed, ``start`` continues from its last
        checkpoint.
    population : Population, optional
        The clients to ask and the units to count; by default the clients that the plan's sampling
        draws.
    exposed : Sequence[str]
        Other things, before or beside the run, that reveal something about the clients' data, a
        line each. The guarantees list them as not covered.
    frozen : str
        Fingerprint of the parts that no client trains (`Task.fingerprint`). Every node takes these
        parts from its own copy of the base model; the server refuses a node with another copy
        before the first round.
    """

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, record the spend durably, and return the messages to the cohort.

        Cohorts, stragglers, batches and learning rates are numbered by training rounds. A strategy
        that trains in some rounds only, as in `Upcycled`, thus trains as it would without the other
        rounds.

        Raises
        ------
        BudgetExhausted
            This round would exceed the budget; nothing was sent.
        """
        self.connect(grid, arrays)
        config = ConfigRecord({**config, "server-round": server_round})  # as Flower's strategies do
        number = self.next_training
        if number == 1:
            self._rehearse(grid, config)
        secret = self.accounted.release is not None and not self.repeats  # ε needs it
        drawn = self.population.draw(
            secure_generator() if secret else self._generator("cohort", number)
        )
        self._check_budget(server_round, drawn)
        if number - 1 == self.accounted.planned_rounds and not self.spending.limited:
            log.warning(
                "training round %d is beyond the %d of the plan: ε now exceeds the value for which "
                "its noise was chosen, and no budget ends the run",
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
        """Refuse malformed replies, sum the others as they arrive, and add the server's noise."""
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
        for partition, metrics in told.items():  # keep the smallest: no report makes ε smaller
            if "num-examples" in metrics:
                size = int(metrics["num-examples"])
                self.num_examples[partition] = min(size, self.num_examples.get(partition, size))
        if self.client.keeps_memory and not (self.client.mirrored and mean is None):
            self.remembered |= dict.fromkeys(told, self.participations.rounds)
        if mean is None:
            return None, records.metrics_record(row)
        released_only = (
            self.accounted.release is not None
        )  # the model must use only the released mean
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
            spent = "" if self.accounted.delta is None else "; its privacy is spent nevertheless"
            log.warning("round %d discarded: %s%s", server_round, reason, spent)
            self.progress.row["discarded"] = 1
            release.discard(str(reason))
            return None
        finally:
            updates.hear_out()
        facts = {"answered": aggregate.answered, "topped_up_stddev": aggregate.topped_up_stddev}
        self.progress.row |= facts
        release.note(cohort=len(self.cohort.asked), **facts)
        return dict(aggregate.value)

    def guarantees(self) -> list[Guarantee]:
        """Return the guarantees after the rounds so far, published and provable.

        The provable guarantees use the participations of this run, which depend on nobody's data.
        """
        if not self.participations.rounds:
            return []
        claims, scored = self.claims(self.run_facts), self.participations.evaluations
        claims = [replace(one, units=self.num_units) for one in claims]
        return [
            replace(one, not_covered=(*one.not_covered, _ROUNDS_ALONE))
            if scored and one.basis == "published"
            else one
            for one in claims
        ]

    def spent(self) -> dict[str, float]:
        """Return the ε spent so far and its δ, for the log and the report's figures."""
        run = self.run_facts
        spent = self.accounted.spent(run)
        if spent and self.accounted.delta is not None:
            spent["delta"] = self.accounted.delta
            if units := self.num_units:
                spent["privacy_units"] = units
        if self.accounted.release is not None:  # other plans know their published ε
            for one in self.claims(run):
                if one.basis == "published":
                    spent["epsilon_published"] = one.epsilon
        return spent

    def _protection(self) -> dict[str, Any]:
        """Return the facts by which a round's message asks clients to protect their uploads."""
        asked = self.accounted.protection(self.run_facts, len(self.cohort.asked))
        facts = to_facts(asked, seeded_noise=self.seeded_noise)
        return {"report-size": True, **facts} if self.accounted.tells_sizes else facts

    def connect(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Store ``arrays`` as the model to send; the first time, connect to the clients."""
        self.sent = records.shared_arrays(self.shared(arrays))
        new = not self._met
        self._meet(grid)
        roster = self.exchange.roster
        if new and roster is not None and roster.foreign and self.accounted.delta is not None:
            records.refuse_tied(arrays)

    def _meet(self, grid: Grid) -> None:
        if self._met:
            return
        by_clients = self.accounted.client_protects
        mod = self.any_client_app and by_clients and self.accounted.release is not None
        roster = self.exchange.connect(grid, self.population.num_nodes, mods=mod)
        secure = isinstance(self.accounted, NoisedSum) and self.accounted.secure_aggregation
        if roster.foreign and secure:
            raise InvalidValue(
                "secure_aggregation: expected None, because the nodes' ClientApp does not use this "
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

    def _rehearse(self, grid: Grid, config: ConfigRecord) -> None:
        """Find out if a ClientApp of another project can train, before its rounds cost privacy."""
        roster = self.exchange.roster
        if roster is not None and roster.foreign and self.accounted.delta is not None:
            model = records.to_record(self.sent)
            trusted = not self.accounted.client_protects
            self.exchange.rehearse(
                grid,
                {records.MODEL: model, records.CONFIG: config},
                lambda reply: records.read_update(reply, base=self.sent, trust_models=trusted),
            )

    def _check_frozen(self, grid: Grid) -> None:
        """Ask nodes if they have the server's base model.

        Simulated nodes share one copy, so asking one of them is enough.
        """
        nodes = [*self.exchange.nodes]
        content = {records.FROZEN: ConfigRecord({"fingerprint": self.frozen})}
        asked = dict.fromkeys(nodes[:1] if in_simulation() else nodes, content)
        self.exchange.query(grid, asked, records.read_answer)

    def _ask_sizes(self, grid: Grid) -> None:
        """Ask clients for their numbers of examples, which the next round's ε depends on.

        Their first uploads would reveal these numbers anyway.
        """
        content = {records.ROUND: self._facts(0, {"report-size": True})}
        everyone = dict.fromkeys(self.exchange.nodes, content)
        told = self.exchange.query(grid, everyone, records.read_answer)
        self.num_examples |= {p: int(answer["num-examples"]) for p, answer in told.items()}

    def check_training(self) -> None:
        """Refuse local training that the plan does not cover; every round calls this check.

        Raises
        ------
        InvalidValue
            A setting does not fit; the message names it, and the value that the plan expects.
        """
        self.accounted.check_training(self.run_facts)

    def _agree(self, number: int, server_round: int, grid: Grid) -> SecureRound | None:
        """Let the cohort agree on masks if the plan sums securely; drop clients that do not."""
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
        except RoundDiscarded as reason:  # the cohort does not train
            found, asked, self._too_few = None, [], str(reason)
        self.cohort = replace(self.cohort, asked=asked)
        return found

    def _own_records(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the records for one client only, including those of the secure sum."""
        assert self.secure_round is not None
        return {**self.client_state(partition), **self.secure_round.own(partition)}

    def _check_budget(self, server_round: int, cohort: Cohort) -> None:
        """Refuse a round with which the provable ε would exceed the budget."""
        if self.budget is not None:
            ahead = deepcopy(self.population)
            ahead.count(cohort, len(cohort.asked))
            self._check_spending(server_round, ahead.participations)
