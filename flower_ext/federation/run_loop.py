"""The loop of a run, new or resumed: its rounds, its files and its end."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from logging import getLogger
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation._flower_private import record_of, replies
from flower_ext.federation.arrays import require_finite
from flower_ext.federation.client import ClientMethod
from flower_ext.federation.cohort import FederationNotReady
from flower_ext.federation.exchange import Exchange
from flower_ext.federation.population import Population
from flower_ext.federation.progress import Progress
from flower_ext.federation.spending import Spending
from flower_ext.federation.state.checkpoint import Asked, Checkpoints, RunState
from flower_ext.privacy import Budget, BudgetExhausted, Guarantee, Ledger
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.runs import RunDirectory
from flower_ext.training import matches

log = getLogger("flwr")

_NO_DIGITS = str.maketrans("", "", "0123456789")


class RunLoop(Strategy):
    """Base of strategies whose runs can be resumed after an interruption.

    The loop plays a round by Flower's four methods (``configure_train``, …) only. This class holds
    all state that these methods change between two rounds, and a checkpoint stores all of it.

    Parameters
    ----------
    population : Population
        Counts the units whose data the rounds used.
    repeats : bool
        True if a repeated round equals the first attempt, bit for bit.
    personal : Sequence[str]
        Names of modules that never leave the client.
    timeout : float
        Seconds to wait for nodes to connect, and for answers to queries.
    spending : Spending
        Budget and ledger; the ledger has to hold every release of a resumed run.
    run : RunDirectory, optional
        Directory for metrics and checkpoints. If it was resumed, ``start`` continues from its last
        checkpoint.
    """

    client: ClassVar[ClientMethod]

    def __init__(
        self,
        *,
        population: Population,
        repeats: bool,
        personal: Sequence[str],
        timeout: float,
        spending: Spending,
        run: RunDirectory | None,
    ) -> None:
        self.population = population
        self.personal = tuple(personal)
        self.timeout = timeout
        self.spending = spending
        self.progress = Progress(run)
        self.exchange = Exchange(self.client.name, self.progress, timeout=timeout)
        self.checkpoints = Checkpoints(run, repeats=repeats)
        self.num_examples: dict[int, int] = {}
        self.client_metrics: dict[int, dict[str, float]] = {}
        self.remembered: dict[int, int] = {}
        """By partition, the last training round that the client answered, and so remembers."""
        self.stopped: str | None = None
        self._ever_answered = False
        self._last_round: int | None = None

    # What a run needs to know ---------------------------------------------------------------

    @abstractmethod
    def connect(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Connect to the clients, once, and ask them for the facts that the first round needs."""

    @abstractmethod
    def guarantees(self) -> list[Guarantee]:
        """Return the guarantees after the rounds so far."""

    @abstractmethod
    def spent(self) -> dict[str, float]:
        """Return ε so far, for the log and the report's figures."""

    def count_evaluation(self) -> None:
        """Count an evaluation that was asked for, where evaluations are noised and accounted."""

    def state(self) -> Mapping[str, records.Arrays]:
        """Return what the method keeps on the server between rounds, in named groups."""
        return {}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Restore the result of `state` in a new process, after `connect`."""

    @property
    def server_step(self) -> str:
        """Name of the server's step from the accepted updates to the next model."""
        return f"the server's step of {type(self).__name__}"

    @property
    def participations(self) -> Participations:
        """Counts of the units whose data the rounds so far used."""
        return self.population.participations

    @property
    def ledger(self) -> Ledger | None:
        """The durable record of every release, if there is one."""
        return self.spending.ledger

    @property
    def budget(self) -> Budget | None:
        """The budget, if there is one; the run ends before a round that would exceed it."""
        return self.spending.budget

    @property
    def refusals(self) -> list[str]:
        """Replies that the server refused, with the reasons."""
        return self.exchange.refusals

    def shared(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return the part of a model that clients share.

        Raises
        ------
        InvalidValue
            Every parameter is personal.
        """
        found = {n: a for n, a in arrays.items() if not matches(n, self.personal)}
        if not found:
            raise InvalidValue(f"personal={self.personal}: expected at least one shared parameter")
        return record_of(ArrayRecord, found)

    # The run --------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Run up to round ``num_rounds``, or until the budget is exhausted (see ``stopped``).

        If the run directory was resumed, the run continues, and ``initial_arrays`` only identify
        the model. ``evaluate_fn`` is called with the shared part of the model after each round. In
        a new run it is also called before the first round, with the number 0.

        Parameters
        ----------
        grid : Grid
        initial_arrays : ArrayRecord
            The whole initial model; personal parts are dropped from it.
        num_rounds : int
            Number of the last round, counted from the beginning of the run.
        timeout : float
            Seconds to wait for the replies of a round.
        train_config, evaluate_config : ConfigRecord, optional
            Settings that the server sends to the clients.
        evaluate_fn : Callable, optional
            Evaluates the shared part of the model on the server.
        should_stop : Callable, optional
            Called after each round with its number and the results so far; True ends the run there.

        Raises
        ------
        FederationNotReady
            A node is missing, or no client ever sent a usable reply.
        InvalidValue
            A name in ``personal`` is misspelt, so that its part would be shared; or the initial
            model, or a model after the server's step, is not finite.
        """
        self.summary()
        self._check_personal(sorted(initial_arrays))
        self._last_round = num_rounds
        result = Result()
        result.arrays, done = self._resume(grid, self.shared(initial_arrays), num_rounds)
        if done >= num_rounds:
            log.info("nothing left to do: all %d rounds are done", done)
        require_finite(
            records.to_arrays(result.arrays),
            f"in the model before round {done + 1}",
            "begin with a finite model",
        )
        train, evaluate = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        if evaluate_fn is not None and not done:
            self._evaluate_here(0, result, evaluate_fn)
        with self._guarding():
            for server_round in range(done + 1, num_rounds + 1):
                try:
                    self._play(server_round, grid, result, timeout, train, evaluate, evaluate_fn)
                except BudgetExhausted as reason:
                    self.stopped = str(reason)
                    log.warning("stopped before round %d: %s", server_round, reason)
                    self._end_after(server_round - 1, grid, result, timeout, evaluate)
                    break
                if should_stop is not None and should_stop(server_round, result):
                    log.info("stopped after round %d: should_stop returned True", server_round)
                    self._end_after(server_round, grid, result, timeout, evaluate)
                    break
                self._check_answers(done, least=max(3, self.population.num_nodes / 2))
            self._check_answers(done, least=1)
        return result

    def _play(
        self,
        server_round: int,
        grid: Grid,
        result: Result,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        """Play one round: train, evaluate, and record the results."""
        started = time.monotonic()
        self.progress.begin()
        asked = self.configure_train(server_round, result.arrays, train_config, grid)
        answers = replies(grid, asked, timeout=timeout) if asked else []
        moved, metrics = self.aggregate_train(server_round, answers)
        if moved is not None:
            self._check_step(server_round, moved)
            result.arrays = moved
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        self.progress.row["training_seconds"] = time.monotonic() - started
        scored = self._evaluate(server_round, grid, result, timeout, evaluate_config)
        if evaluate_fn is not None:
            self._evaluate_here(server_round, result, evaluate_fn)
        if scored or server_round == self._last_round:
            self.progress.row |= self.spent()
            self._save_guarantees()
        self.progress.row["seconds"] = time.monotonic() - started
        self.progress.end(server_round, self._last_round or server_round)
        self._save(server_round, result.arrays)

    def _check_answers(self, done: int, *, least: float) -> None:
        """End the run if no client ever sent a usable reply, and ``least`` replies were refused.

        Later rounds would be spent in vain. A few clients alone do not end a run early.
        """
        if len(self.refusals) >= least and not (done or self._ever_answered):
            raise FederationNotReady(
                f"no client ever sent a usable reply; the first refusal: {self.refusals[0]}"
            )

    def _check_step(self, server_round: int, moved: ArrayRecord) -> None:
        """Refuse a model, or a state of the server, that is not finite after the server's step.

        Accepted updates are finite, so the step is the cause and no client. Every later round would
        be spent in vain.
        """
        remedy = f"change the settings of {self.server_step}, or take a smaller learning rate"
        groups = {"in the model": records.to_arrays(moved)}
        groups |= {f"in the server's state {name!r}": group for name, group in self.state().items()}
        for place, arrays in groups.items():
            where = f"{place} after {self.server_step} in round {server_round}"
            require_finite(arrays, where, remedy)

    def _evaluate(
        self, server_round: int, grid: Grid, result: Result, timeout: float, config: ConfigRecord
    ) -> bool:
        """Ask for scores if this round evaluates; return True if there are any."""
        asked = self.configure_evaluate(server_round, result.arrays, config, grid)
        answers = replies(grid, asked, timeout=timeout) if asked else []
        scores = self.aggregate_evaluate(server_round, answers) if asked else None
        if scores is not None:
            result.evaluate_metrics_clientapp[server_round] = scores
        return scores is not None

    @staticmethod
    def _evaluate_here(
        server_round: int,
        result: Result,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None],
    ) -> None:
        """Evaluate on the server by the caller's ``evaluate_fn``."""
        own = evaluate_fn(server_round, result.arrays)
        if own is not None:
            result.evaluate_metrics_serverapp[server_round] = own

    def _end_after(
        self, last: int, grid: Grid, result: Result, timeout: float, config: ConfigRecord
    ) -> None:
        """End the run after round ``last``: evaluate it, if it was not, and save the guarantees."""
        self._last_round = last
        if last and not self.progress.evaluated(last):
            self.progress.row = {}
            if self._evaluate(last, grid, result, timeout, config):
                self.progress.row |= self.spent()
                self.progress.add(last)
                self._save(last, result.arrays)
        self._save_guarantees()

    # What it leaves -------------------------------------------------------------------------

    def _save(self, server_round: int, arrays: ArrayRecord) -> None:
        self.checkpoints.save(
            RunState(
                round=server_round,
                model=records.to_arrays(arrays),
                participations=self.participations,
                num_examples=self.num_examples,
                client_metrics=self.client_metrics,
                remembered=self.remembered,
                refusals=self.refusals,
                method=self.state(),
            )
        )

    def _save_guarantees(self) -> None:
        """Write the guarantees after the rounds so far to ``guarantee.json``."""
        run = self.checkpoints.run
        if run is not None and (guarantees := self.guarantees()):
            run.save_guarantees(guarantees)

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """If the block fails, write guarantees that cover everything that was asked until then."""
        try:
            yield
        except BaseException as error:
            try:
                with self.spending.closing() as release:  # a reserved release stays spent
                    release.discard(f"{type(error).__name__}: {error}")
                if (one := self.checkpoints.open) is not None:
                    self._count_abandoned(one)
                self._save_guarantees()
            except Exception:  # it must not hide the error that ended the run
                log.exception("no guarantee could be written")
            raise

    # When it goes on ------------------------------------------------------------------------

    def _check_personal(self, names: Sequence[str]) -> None:
        """Refuse a misspelt name in ``personal``.

        If no name fits the model and none looks misspelt, only warn, because the model may lack
        these parts on purpose.
        """
        modules = {name.rsplit(".", 1)[0] for name in names} | {*names}
        unknown = [p for p in self.personal if not any(matches(name, [p]) for name in names)]
        if unknown and len(unknown) < len(self.personal):
            raise InvalidValue(
                f"personal={self.personal!r}: expected names of modules of the model, which are "
                f"{sorted(modules - {*names})}; {unknown} match none, and a part that is not named "
                "is shared"
            )
        for prefix in unknown:
            # A name that differs only in its number is no typing error: the server's model may
            # lack that layer.
            letters = prefix.translate(_NO_DIGITS)
            near = get_close_matches(prefix, modules)
            alike = [name for name in near if name.translate(_NO_DIGITS) != letters]
            if any(f".{prefix}." in f".{name}." for name in names):
                alike = [f"*.{prefix}"]
            if alike:
                raise InvalidValue(
                    f"personal={prefix!r}: expected the name of a part of the model; did you mean "
                    f"{alike[0]!r}? A part that is not named is shared, and a parameter that is "
                    "tied to another goes by the other's name"
                )
            log.warning("personal=%r matches no parameter of the model: %s", prefix, names)

    def _resume(self, grid: Grid, initial: ArrayRecord, num_rounds: int) -> tuple[ArrayRecord, int]:
        """Return the model and the number of finished rounds from which to continue.

        For a new run these are ``initial`` and 0.

        Raises
        ------
        Damaged
            No checkpoint is intact.
        InvalidValue
            The checkpoint holds another model.
        FederationNotReady
            Clients have lost the memory that the method needs.
        LedgerCorrupt
            The ledger lacks releases that were made.
        """
        run = self.checkpoints.run
        if run is None or not run.resumed:
            return initial, 0
        found = self.checkpoints.newest()
        done, arrays, strangers = 0, initial, False
        if found is not None:
            done, arrays = found.round, _same_model(found.model, initial)
            self._take(found)
            if done < num_rounds:  # a finished run needs no clients
                self.connect(grid, arrays)
                strangers = not self.exchange.knows_partitions
            self.restore(found.method)
        abandoned = self.checkpoints.abandoned(after=self.participations.rounds)
        for one in abandoned:
            self._count_abandoned(one)
        for _ in range(self.participations.evaluations, self.checkpoints.evaluations()):
            self.count_evaluation()
        if strangers:
            self.population.forget_who()
        self._save_guarantees()
        if self.ledger is not None:
            counted = self.participations.rounds + self.participations.evaluations
            self.ledger.check_holds(counted)
        if found is not None and done < num_rounds and self.client.keeps_memory:
            self._check_memory(grid)
        run.forget_rounds(after=done)
        log.info(
            "resumed after round %d; %d training rounds had begun but were not finished",
            done,
            len(abandoned),
        )
        return arrays, done

    def _count_abandoned(self, one: Asked) -> None:
        self.population.count_abandoned(one.participants, one.may_have_answered, asked=one.asked)

    def _take(self, state: RunState) -> None:
        self.population.participations = state.participations
        self.num_examples = dict(state.num_examples)
        self.client_metrics = dict(state.client_metrics)
        self.remembered = dict(state.remembered)
        self.refusals.extend(state.refusals)

    def _check_memory(self, grid: Grid) -> None:
        """Ask all clients if they still have the memory that they had at the checkpoint.

        Raises
        ------
        FederationNotReady
            A client has lost it.
        """
        number = self.participations.rounds
        known = ConfigRecord({"run": self.checkpoints.run_id, "number": number})
        everyone = {
            partition: {records.ROUND: known} for partition in range(self.population.num_nodes)
        }
        told, needed = self.exchange.query(grid, everyone, _read_version), self.remembered
        lost = [p for p, version in sorted(told.items()) if version < needed.get(p, 0)]
        if lost:
            raise FederationNotReady(
                f"partitions {lost[:10]}{' …' if len(lost) > 10 else ''} no longer have the memory "
                f"that {type(self).__name__} needs (partition {lost[0]} had it from training "
                f"round {needed[lost[0]]}, now from {told[lost[0]] or 'none'}), so the run cannot "
                "continue. Memory outlives a process only if the SuperNodes, or the settings of a "
                "simulation, name a state-folder. A method that keeps no memory declares "
                "ClientMethod(keeps_memory=False)"
            )


def _same_model(kept: records.Arrays, initial: ArrayRecord) -> ArrayRecord:
    shapes = {name: (array.shape, str(array.dtype)) for name, array in kept.items()}
    expected = {name: (tuple(array.shape), array.dtype) for name, array in initial.items()}
    if shapes != expected:
        raise InvalidValue(
            f"the checkpoint holds another model than the initial one: arrays {sorted(shapes)}, "
            f"expected {sorted(expected)} with the same shapes and types"
        )
    return records.to_record(kept)


def _read_version(reply: Message) -> int:
    told = records.read_answer(reply).get("version")
    if told is None or told.shape or not np.issubdtype(told.dtype, np.integer) or told < 0:
        raise records.RefusedReply("'version': expected the number of a training round")
    return int(told)
