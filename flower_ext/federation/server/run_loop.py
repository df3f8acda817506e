"""The loop of a run, new or resumed: its rounds, its files and its end."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.federation._flower_private import replies
from flower_ext.federation.messages import records
from flower_ext.federation.messages.replies import read_count
from flower_ext.federation.messages.roster import FederationNotReady
from flower_ext.federation.server.connection import connect
from flower_ext.federation.server.query_round import QueryRound
from flower_ext.federation.server.run import MODEL, Run
from flower_ext.federation.server.run_guarantees import save_guarantees, spent_by
from flower_ext.federation.server.run_terms import check_same, terms_of
from flower_ext.federation.storage.checkpoint import FOLDER
from flower_ext.federation.storage.folder import Damaged, Stored
from flower_ext.privacy import BudgetExhausted
from flower_ext.privacy.mechanisms.updates import require_finite
from flower_ext.privacy.shared_ledger import check_charged
from flower_ext.runs import RunWriter

log = getLogger("flwr")


@dataclass(kw_only=True, eq=False)
class RunLoop:
    """Plays the rounds of a new or resumed run through the four methods of a Flower strategy.

    ``player`` is the strategy of the run, or a wrapper around this strategy. The other fields are
    as in `FederatedStrategy.start`.
    """

    run: Run
    player: Strategy
    grid: Grid
    num_rounds: int
    timeout: float
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None
    should_stop: Callable[[int, Result], bool] | None
    result: Result = field(default_factory=Result, init=False)

    def start(self, initial_arrays: ArrayRecord) -> Result:
        """Play the rounds that are left; see `FederatedStrategy.start`."""
        run, result = self.run, self.result
        run.last_round, run.checkpoints.withdrawn = self.num_rounds, run.spending.withdrawn
        result.arrays, done = self._resume(records.to_record(run.shared_part(initial_arrays)))
        if done >= self.num_rounds:
            log.info("nothing left to do: all %d rounds are done", done)
        if run.query_sums and self.num_rounds == 0:
            log.warning("num_rounds=0: no query of the plan is asked; take num_rounds=1")
        require_finite(
            records.to_arrays(result.arrays),
            f"in the model before round {done + 1}",
            "begin with a finite model",
        )
        if not done:
            self._evaluate_on_server(0)
        with self._guarding():
            for server_round in range(done + 1, self.num_rounds + 1):
                try:
                    self._play(server_round)
                except BudgetExhausted as reason:
                    run.stopped = str(reason)
                    log.warning("stopped before round %d: %s", server_round, reason)
                    self._end_after(server_round - 1)
                    break
                if self.should_stop is not None and self.should_stop(server_round, result):
                    log.info("stopped after round %d: should_stop returned True", server_round)
                    self._end_after(server_round)
                    break
                self._check_answers(done, least=max(3, run.population.num_nodes / 2))
            self._check_answers(done, least=1)
        result.arrays = records.to_record(run.evaluated(result.arrays))
        return result

    def _play(self, server_round: int) -> None:
        """Play one round: train, evaluate, and record the results."""
        run, result, started = self.run, self.result, time.monotonic()
        run.progress.begin()
        self._ask_first_queries(server_round)
        messages = self.player.configure_train(
            server_round, result.arrays, self.train_config, self.grid
        )
        model, metrics = self.player.aggregate_train(server_round, self._replies(messages))
        if model is not None:
            result.arrays = model
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        run.progress.row["training_seconds"] = time.monotonic() - started
        is_scored = self._evaluate(server_round)
        self._evaluate_on_server(server_round)
        if is_scored or server_round == run.last_round:
            run.progress.row |= spent_by(run)
            save_guarantees(run, in_account=server_round == run.last_round)
        # Write the row first, and then the checkpoint: a resumed run drops rows without a
        # checkpoint.
        run.progress.row["seconds"] = time.monotonic() - started
        run.progress.end(server_round, run.last_round or server_round)
        run.save(server_round, records.to_arrays(result.arrays))

    def _ask_first_queries(self, server_round: int) -> None:
        """Ask the queries with the schedule "first", before the first training round."""
        run = self.run
        for query_sum in run.query_sums:
            answered = run.participations.answers[query_sum.query.name]
            if query_sum.query.schedule == "first" and answered < query_sum.query.times:
                connect(run, self.grid, self.result.arrays)
                query_round = QueryRound(run, server_round, query_sum)
                messages = query_round.ask(run.model, self.evaluate_config)
                query_round.close(self._replies(messages))
                run.progress.count_as_query()  # this was no evaluation, and scored nobody

    def _replies(self, messages: Iterable[Message]) -> Iterable[Message]:
        return replies(self.grid, messages, timeout=self.timeout) if messages else []

    def _check_answers(self, done: int, *, least: float) -> None:
        """End the run if no client ever sent a usable reply: its rounds cost privacy in vain.

        As long as the server has refused fewer than ``least`` replies, the run continues, so that a
        few clients alone cannot end it early.
        """
        clients = self.run.clients
        if clients.refused >= least and not (done or self.run.ever_answered):
            raise FederationNotReady(
                f"no client ever sent a usable reply; the first refusal: {clients.refusals[0]}"
            )

    def _evaluate(self, server_round: int) -> bool:
        """Ask for scores if this round evaluates; return True if clients sent any."""
        messages = self.player.configure_evaluate(
            server_round, self.result.arrays, self.evaluate_config, self.grid
        )
        if not messages:
            return False
        scores = self.player.aggregate_evaluate(server_round, self._replies(messages))
        if scores is not None:
            self.result.evaluate_metrics_clientapp[server_round] = scores
        return scores is not None

    def _evaluate_on_server(self, server_round: int) -> None:
        """Evaluate on the server with the caller's ``evaluate_fn``."""
        if self.evaluate_fn is None:
            return
        model = records.to_record(self.run.evaluated(self.result.arrays))
        scores = self.evaluate_fn(server_round, model)
        if scores is not None:
            self.result.evaluate_metrics_serverapp[server_round] = scores

    def _end_after(self, last: int) -> None:
        """End the run after round ``last``: evaluate it if necessary, and save the guarantees."""
        run = self.run
        run.last_round = last
        if last and not run.progress.evaluated(last):
            run.progress.row = {}
            if self._evaluate(last):
                run.progress.row |= spent_by(run)
                run.progress.add(last)
                run.save(last, records.to_arrays(self.result.arrays))
        save_guarantees(run)

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """If the block fails, write guarantees that count every request sent before the failure."""
        try:
            yield
        except BaseException as error:
            try:
                with self.run.spending.closing() as release:  # a reserved release stays spent
                    release.discard(f"{type(error).__name__}: {error}")
                if (abandoned := self.run.checkpoints.open) is not None:
                    self.run.count_abandoned(abandoned)
                save_guarantees(self.run)
            except Exception:  # it must not hide the error that ended the run
                log.exception("no guarantee could be written")
            raise

    def _resume(self, initial: ArrayRecord) -> tuple[ArrayRecord, int]:
        """Return the model from which to continue, and the number of rounds that are finished."""
        run, directory = self.run, self.run.directory
        if directory is None:
            return initial, 0
        checkpoint = run.checkpoints.newest() if directory.resumed else None
        if checkpoint is not None:
            run.check_model(checkpoint.arrays[MODEL])
        terms = terms_of(run, self.player)
        check_same(directory.path, directory.first_terms(terms), terms)
        if not directory.resumed:
            return initial, 0
        done = 0 if checkpoint is None else int(checkpoint.values["round"])
        arrays = initial if checkpoint is None else records.to_record(checkpoint.arrays[MODEL])
        is_unfinished = checkpoint is not None and done < self.num_rounds
        if checkpoint is not None:
            self._restore(checkpoint, arrays if is_unfinished else None)
        num_abandoned = self._count_begun_rounds()
        if is_unfinished and not run.clients.roster.known:
            run.population.equalise_counts()  # a node may have had another partition before
        self._check_account(directory)
        if is_unfinished and run.method.client.keeps_memory:
            self._check_memory()
        directory.forget_rounds(after=done)
        log.info(
            "resumed after round %d; %d training rounds had begun but were not finished",
            done,
            num_abandoned,
        )
        return arrays, done

    def _restore(self, checkpoint: Stored, model: ArrayRecord | None) -> None:
        """Restore a checkpoint; ``model`` is None if no rounds, and so no clients, are needed."""
        run, budget = self.run, self.run.spending.budget
        run.restore(checkpoint)
        if budget is not None and budget.ledger is not None:  # before any client is asked
            least = {"": min(1, run.participations.rounds)}
            check_charged(budget.ledger, run.checkpoints.run_id, least)
        # Connect before restoring the sums: each sum keeps the larger privacy cost, of the new
        # set-up or of the checkpoint.
        if model is not None:
            connect(run, self.grid, model)
        run.summation.restore(checkpoint.arrays)
        run.population.forget_order()

    def _count_begun_rounds(self) -> int:
        """Count what began after the checkpoint, and return the number of training rounds in it.

        It counts because it may have reached clients.
        """
        run = self.run
        abandoned = run.checkpoints.abandoned(after=run.participations.rounds)
        for begun in abandoned:
            run.count_abandoned(begun)
        run.count_unnoted()
        for query_sum in run.query_sums:
            counted = run.participations.answers[query_sum.query.name]
            for _ in range(counted, run.checkpoints.times_asked(query_sum.query.name)):
                query_sum.count_answer(run.participations)
        return len(abandoned)

    def _check_account(self, directory: RunWriter) -> None:
        """Save the guarantees; refuse files that count fewer releases than the run has made."""
        run, budget = self.run, self.run.spending.budget
        rounds, answers = run.participations.rounds, run.participations.answers
        # Without a checkpoint or with an older one, the run would forget what clients uploaded.
        num_answered = len(directory.metrics().series("answered")[0])
        if rounds < num_answered and not run.repeats:
            raise Damaged(
                f"{directory.path / FOLDER} counts {rounds} training rounds, and metrics.jsonl has "
                f"{num_answered}: expected the newest files; restore them, or begin a new run"
            )
        if budget is not None and budget.ledger is not None and run.mechanism.delta is not None:
            check_charged(budget.ledger, run.checkpoints.run_id, {"": rounds, **answers})
        save_guarantees(run)
        # A ledger that lacks a release was cut off or exchanged, and would show too much budget
        # left.
        if (ledger := run.spending.ledger) is not None:
            ledger.check_holds(rounds + answers.total())

    def _check_memory(self) -> None:
        """Refuse to continue if a client has lost the memory that it had at the checkpoint."""
        run, needed = self.run, self.run.remembered
        known = run.round_record(max(1, run.participations.rounds))
        everyone = {partition: {records.ROUND: known} for partition in run.clients.nodes}
        versions = run.clients.ask_all(everyone, partial(read_count, name="version"))
        lost = [p for p, version in sorted(versions.items()) if version < needed.get(p, 0)]
        if lost:
            newest = versions[lost[0]]
            now = f"only that of round {newest}" if newest else "none"
            raise FederationNotReady(
                f"partitions {lost[:10]}{' …' if len(lost) > 10 else ''} no longer have the memory "
                f"that {run.method.name} needs, so the run cannot continue: begin a new run. "
                f"Partition {lost[0]} stored memory in training round {needed[lost[0]]}, and has "
                f"{now} now. To keep memory when a process ends, name a state-folder: in the node "
                "config of each SuperNode, in the settings of a simulation, or by "
                "InProcessGrid(..., {'state-folder': PATH}). A method that keeps no memory "
                "declares ClientMethod(memory=Memory.NONE)"
            )
