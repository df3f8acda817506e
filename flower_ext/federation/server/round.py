"""One round that releases a mean: open the sum, ask clients, read and add up their answers.

Training rounds and queries are such rounds. A `TrainingRound` asks a cohort to
train, and the server's step moves the model by the mean. Rounds of other kinds are in
`query_round`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message

from flower_ext.errors import InvalidValue
from flower_ext.federation.client.client_method import Memory
from flower_ext.federation.messages import records
from flower_ext.federation.messages.exchange import Content, Requests
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.method import Released
from flower_ext.federation.method_state import State
from flower_ext.federation.population import Cohort
from flower_ext.federation.server.connection import leave_out_withdrawn, rehearse
from flower_ext.federation.server.run import Run
from flower_ext.federation.server.run_guarantees import charge, summary_of
from flower_ext.federation.server.spending import Spending
from flower_ext.federation.server.stragglers import shortened
from flower_ext.federation.storage.checkpoint import BegunRound
from flower_ext.federation.sums.plain import PlainSum
from flower_ext.federation.sums.summation import Opening, OpenSum, Summation
from flower_ext.privacy import secure_generator
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.noised_sum import QuerySum
from flower_ext.privacy.mechanisms.protections import Protection, Unprotected
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundDiscarded
from flower_ext.privacy.mechanisms.updates import require_finite

log = getLogger("flwr")


class Round:
    """One round that releases a mean: call `ask`, and then `close`.

    The constructor opens the round's sum. Before you create the round, reserve its privacy cost
    (`Spending.reserve`): a client that was asked may have uploaded, even if the server then fails.
    The ``kind`` of the messages is ``train`` or ``evaluate``.
    """

    def __init__(
        self, kind: str, summation: Summation, opening: Opening, spending: Spending
    ) -> None:
        self.kind, self.server_round = kind, opening.server_round
        self._clients, self._spending = opening.clients, spending
        self.requests: Requests | None = None
        """The messages to the cohort; None before `ask`."""
        self.discard_reason = ""
        """The reason why the round releases nothing; empty if it releases a mean."""
        self.metrics: dict[int, Mapping[str, float]] = {}
        """Metrics of the accepted contributions by partition."""
        self.kept: dict[int, Update] = {}
        """The accepted contributions by partition, if `close` keeps them."""
        self.sum: OpenSum
        try:
            self.sum = summation.open(opening)
        except RoundDiscarded as reason:
            self.discard_reason = str(reason)
            # An empty sum takes the place of the one that cannot begin. The cohort keeps its units:
            # they were drawn, and the round counts for them.
            nobody = replace(opening, cohort=replace(opening.cohort, partitions=()))
            self.sum = PlainSum(summation.mechanism).open(nobody)

    @property
    def cohort(self) -> Cohort:
        """The clients that contribute, and the units whose data they use."""
        return self.sum.cohort

    def ask(self, contents: Mapping[int, Content]) -> list[Message]:
        """Return the messages to the cohort, each with the records that the sum adds."""
        extra = {partition: self.sum.request(partition) for partition in contents}
        # Equal messages share one content object, which engines then copy only once.
        whole = {
            p: {**content, **extra[p]} if extra[p] else content for p, content in contents.items()
        }
        self.requests = self._clients.request(self.kind, whole, self.server_round)
        return self.requests.messages

    def close(
        self, replies: Iterable[Message], *, keep: bool = False, **notes: Any
    ) -> Aggregate | None:
        """Read each reply and add its contribution when it arrives; return the mean of all.

        Return None if the round is discarded; its privacy cost stays spent. ``notes`` are further
        entries of the ledger about this release. If ``keep`` is False, the round drops each
        contribution once it is added, because a thousand models do not fit into memory at a time.
        """
        # The reserved release closes with the block, discarded or not: it is spent either way.
        with self._spending.closing() as release:
            try:
                if self.discard_reason:
                    raise RoundDiscarded(self.discard_reason)
                assert self.requests is not None
                for partition, update in self.requests.accepted(replies, self.sum.read):
                    self.sum.add(update)
                    self.metrics[partition] = update.metrics
                    if keep:
                        self.kept[partition] = update
                aggregate = self.sum.close()
            except RoundDiscarded as reason:
                self.discard_reason = str(reason)
                release.discard(self.discard_reason)
                return None
            release.note(
                **{"cohort": len(self.cohort.partitions), **notes},
                answered=aggregate.answered,
                topped_up_stddev=aggregate.topped_up_stddev,
            )
        return aggregate


def reserve(
    run: Run,
    server_round: int,
    after: Callable[[], Participations],
    answered: QuerySum | None = None,
) -> None:
    """Write a round's privacy cost to disk, before any client knows of the round.

    ``after`` and ``answered`` are as in `charge`. Raise `BudgetExhausted` if the round would exceed
    the privacy budget.
    """
    if run.spending.budget is not None:
        charge(run, server_round, after(), answered=answered)
    # Charge first, and then read withdrawals: a withdrawal before the charge takes effect in this
    # round. A later one may take effect only in the next round.
    leave_out_withdrawn(run)
    if answered is None:
        kind, number = "release", run.participations.rounds + 1
        release = run.mechanism.release_in(number)
    else:
        kind, release = answered.query.name, answered.release
        number = run.participations.answers[kind] + 1
    run.spending.reserve(release, server_round, run.release_identity(kind, number))


class TrainingRound:
    """One training round of a run. The run's clients are connected already.

    Cohorts, stragglers, batches and learning rates depend on the number of the training round. A
    strategy that trains in some rounds only, such as `Upcycled`, therefore trains as it would
    without the other rounds.
    """

    _round: Round

    def __init__(self, run: Run, server_round: int) -> None:
        abandoned = run.checkpoints.open
        if abandoned is not None and not run.repeats:  # a repetition counts once, when it ends
            run.count_abandoned(abandoned)
        self.run, self.training_round = run, run.participations.rounds + 1
        self.server_round = server_round

    @property
    def cohort(self) -> Cohort:
        """The clients that train, and the units whose data they use."""
        return self._round.cohort

    def ask(self, config: ConfigRecord) -> Iterable[Message]:
        """Draw the cohort, record the privacy cost on disk, and return the messages to the cohort.

        Raise `BudgetExhausted` if the round would exceed the privacy budget, or if the run's sum
        permits no more rounds. No client has then learnt of the round.
        """
        run, training_round, server_round = self.run, self.training_round, self.server_round
        if training_round == 1:
            rehearse(run, config)
        run.summation.check_round(training_round)
        run.mechanism.check_training(summary_of(run))
        # The ε of a noised sum assumes that nobody knows the cohort, so no seed may determine it.
        secret = run.mechanism.release is not None and not run.repeats
        rng = secure_generator() if secret else run.options.generator("cohort", training_round)
        drawn = run.population.draw(rng)
        # Even if every client answers, ε must not exceed the budget.
        reserve(run, server_round, partial(run.population.after, drawn))
        if run.withdrawn:
            run.progress.row["withdrawn"] = len(run.withdrawn)
        drawn = run.population.without(drawn, run.withdrawn)
        if training_round - 1 == run.plan.rounds and not run.spending.limited:
            log.warning(
                "training round %d is beyond the %d rounds for which the plan's noise was chosen, "
                "and no budget ends the run",
                training_round,
                training_round - 1,
            )
        # The privacy cost is on disk. Write the noise, then the units, before clients use any data.
        cohort = run.method.begin_round(drawn, run.model, run.method_state)
        protection = run.mechanism.protection(summary_of(run), len(cohort.partitions))
        opening = Opening(
            clients=run.clients,
            population=run.population,
            cohort=cohort,
            number=training_round,
            server_round=server_round,
            noise=run.round_noise(training_round),
            model=run.model,
            protection=protection,
            check=run.method.check_update,
        )
        self._round = Round("train", run.summation, opening, run.spending)
        cohort, contents = self.cohort, self._contents(config, protection)
        counts = self._round.sum.upload_counts()
        begun = BegunRound(
            training_round, [*cohort.units], needed=counts.needed, uploads=counts.honest
        )
        run.checkpoints.begin(begun)
        run.progress.row["cohort"] = len(cohort.partitions)
        if run.population.shows_users:
            run.progress.row["users"] = len(drawn.units)
        run.progress.row |= run.mechanism.state
        return self._round.ask(contents)

    def close(self, replies: Iterable[Message]) -> records.Arrays | None:
        """Add up the replies, and return the model after the server's step; None if discarded."""
        run = self.run
        mean = self._round.close(replies, keep=run.method.needs_each_update)
        self._record()
        if mean is None:
            spent = "" if run.mechanism.delta is None else "; its privacy is spent nevertheless"
            reason = self._round.discard_reason
            log.warning("round %d discarded: %s%s", self.server_round, reason, spent)
            run.progress.row["discarded"] = 1
        mirrored = run.method.client.memory is Memory.MIRRORED
        # Mirrored memory counts only if the server has stored its counterpart.
        if run.method.client.keeps_memory and not (mirrored and mean is None):
            run.remembered |= dict.fromkeys(self._round.metrics, run.participations.rounds)
        if mean is None:
            return None
        mean, run.summation.mechanism = run.mechanism.after(mean)
        return self._step(mean)

    def _contents(
        self, config: ConfigRecord, protection: Protection | None
    ) -> Mapping[int, Content]:
        """Return the content of the message to each client; equal requests share one object."""
        run, method, training_round = self.run, self.run.method, self.training_round
        slow: Mapping[int, float] = {}  # for each straggler, the fraction of its work that it does
        if (stragglers := run.options.stragglers) is not None:
            rng = run.options.generator("stragglers", training_round)
            slow = stragglers.draw(self.cohort.partitions, run.population.num_nodes, rng)
        trainings = {phase: t.in_round(training_round) for phase, t in method.training.items()}
        shared: Content = {
            records.MODEL: records.to_record(run.model),
            records.SETTINGS: ConfigRecord(dict(method.settings(run.plan))),
            records.CONFIG: config,
            **{name: records.to_record(group) for name, group in run.method_state.everyone.items()},
        }

        @cache
        def content(progress: float | None, remembered: int | None) -> Content:
            done = {phase: shortened(training, progress) for phase, training in trainings.items()}
            of_round = run.round_record(
                training_round,
                protection=protection or Unprotected(),
                report_size=run.mechanism.tells_sizes,
                remembered=remembered,
            )
            return {**shared, records.ROUND: of_round, **records.training_records(done)}

        converted: dict[int, ArrayRecord] = {}

        def record(group: records.Arrays) -> ArrayRecord:
            # The messages to several clients may have the same group: convert it only once.
            if id(group) not in converted:
                converted[id(group)] = records.to_record(group)
            return converted[id(group)]

        # A client with mirrored memory goes back to its memory of the last round whose reply the
        # server used.
        mirrored = method.client.memory is Memory.MIRRORED
        contents = {}
        for partition in self.cohort.partitions:
            last = run.remembered.get(partition, 0) if mirrored else None
            common = content(slow.get(partition), last)
            groups = self.cohort.requests.get(partition, {})
            special = {name: record(group) for name, group in groups.items()}
            if partition in self.cohort.models:
                special[records.MODEL] = record(self.cohort.models[partition])
            contents[partition] = {**common, **special} if special else common
        return contents

    def _record(self) -> None:
        """Count the participations, and note the metrics that came with the updates."""
        run, metrics, answered = self.run, self._round.metrics, len(self._round.metrics)
        counts = self._round.sum.upload_counts(answered)
        assert counts.honest is not None
        # Write to disk before the step, because a killed server may have released this round's
        # mean.
        run.checkpoints.finish(counts.honest)
        run.population.count(self.cohort.units, counts.honest, needed=counts.needed)
        run.progress.row |= {"answered": answered, **self._round.sum.measures}
        run.ever_answered |= answered > 0
        if norms := [each["update-norm"] for each in metrics.values() if "update-norm" in each]:
            run.progress.row |= {
                "update_norm_mean": float(np.mean(norms)),  # before clipping
                "update_norm_std": float(np.std(norms)),
            }
        for partition, numbers in metrics.items():
            if "num-examples" in numbers:
                run.note_size(partition, int(numbers["num-examples"]))

    def _step(self, mean: Aggregate) -> records.Arrays:
        """Return the next model, and store the method's next state."""
        run = self.run
        run.progress.row["topped_up_stddev"] = mean.topped_up_stddev
        sampling, hidden = run.plan.sampling, run.mechanism.release is not None
        population = sampling.population
        released = Released(
            mean=dict(mean.value),
            # If the round releases a noised sum, the step must use only the released mean.
            kept=None if hidden or not run.method.needs_each_update else self._round.kept,
            round=self.training_round,
            population=population,
            fraction=sampling.sampling_rate if hidden else len(self._round.metrics) / population,
        )
        result = run.method.step(run.model, released, run.method_state)
        model, state = self._checked(result)
        run.keep(model, state)
        return model

    def _checked(self, result: tuple[records.Arrays, State]) -> tuple[records.Arrays, State]:
        """Return the result of a method's step; refuse a result that no later round could use."""
        # Accepted updates are finite. If the next model is not finite, the step is at fault.
        step = f"the server's step of {self.run.method.name}"
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], State)):
            raise InvalidValue(f"{step}: expected it to return a model and a State")
        model, state = dict(result[0]), result[1]
        for name, sent in self.run.model.items():
            if name not in model:
                raise InvalidValue(f"{step}: expected a model with the array {name!r}")
            stepped = np.asarray(model[name])
            if stepped.shape != sent.shape or stepped.dtype.kind not in "fiub":
                raise InvalidValue(
                    f"{name!r} of shape {stepped.shape} and type {stepped.dtype} after {step}: "
                    f"expected real numbers of shape {sent.shape}"
                )
            model[name] = stepped.astype(sent.dtype)
        remedy = f"change the settings of {step}, or take a smaller learning rate"
        groups = {"in the model": model}
        for name, group in (*state.everyone.items(), *state.server.items()):
            groups[f"in the server's state {name!r}"] = group
        for where, arrays in groups.items():
            after = f"{where} after {step} in round {self.server_round}"
            require_finite(arrays, after, remedy)
        return {name: model[name] for name in self.run.model}, state
