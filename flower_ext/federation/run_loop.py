"""A run, resumed or not: its rounds, the files that it leaves, its end."""

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
from flower_ext.federation.client import ClientMethod
from flower_ext.federation.cohort import FederationNotReady
from flower_ext.federation.exchange import Exchange
from flower_ext.federation.population import Population
from flower_ext.federation.progress import Progress
from flower_ext.federation.spending import Spending
from flower_ext.federation.state.checkpoint import Asked, Checkpoints, RunState
from flower_ext.privacy import Budget, BudgetExhausted, Guarantee, Ledger
from flower_ext.privacy.participations import Participations
from flower_ext.runs import RunDirectory
from flower_ext.training import matches

log = getLogger("flwr")

_NO_DIGITS = str.maketrans("", "", "0123456789")


class RunLoop(Strategy):
    """Base of strategies whose runs end well, and go on where they were cut off.

    It knows the rounds by Flower's four methods (``configure_train``, …) alone. What those change
    between two rounds is here; a checkpoint holds all of it.

    Parameters
    ----------
    population : Population
        Counts whose data went into the rounds.
    repeats : bool
        A round that is done again is the same one, bit for bit.
    personal : Sequence[str]
        Module names that never leave the client.
    timeout : float
        Seconds to wait for nodes to connect, and for answers to queries.
    spending : Spending
        Its ledger has to hold every release of a run that goes on.
    run : RunDirectory, optional
        Where metrics and checkpoints go; if it was resumed, ``start`` goes on from the last one.
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
        """By partition, the training round whose memory the client has, as far as it answered."""
        self.stopped: str | None = None
        self._ever_answered = False
        self._last_round: int | None = None

    # What a run needs to know ---------------------------------------------------------------

    @abstractmethod
    def connect(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Meet the clients, once, and learn from them what the first round needs."""

    @abstractmethod
    def guarantees(self) -> list[Guarantee]:
        """What protects people after the rounds so far."""

    @abstractmethod
    def spent(self) -> dict[str, float]:
        """ε so far, for the log and the report's figures."""

    def count_evaluation(self) -> None:
        """Count an evaluation that was asked for, where evaluations are noised and accounted."""

    def state(self) -> Mapping[str, records.Arrays]:
        """What the method holds on the server between rounds, in named groups; none by default."""
        return {}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Take back what `state` returned, in a new process, after `connect`."""

    @property
    def participations(self) -> Participations:
        """Counts of the units whose data went into the rounds so far."""
        return self.population.participations

    @property
    def ledger(self) -> Ledger | None:
        """The durable record of every release, where there is one."""
        return self.spending.ledger

    @property
    def budget(self) -> Budget | None:
        """What ends the run before a round that would exceed it, where there is one."""
        return self.spending.budget

    @property
    def refusals(self) -> list[str]:
        """Replies that were not used, and why."""
        return self.exchange.refusals

    def shared(self, arrays: ArrayRecord) -> ArrayRecord:
        """The part of a model that clients share.

        Raises
        ------
        ValueError
            All of it is personal.
        """
        found = {n: a for n, a in arrays.items() if not matches(n, self.personal)}
        if not found:
            raise InvalidValue(f"personal={self.personal} leaves no parameter to share")
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
    ) -> Result:
        """Run up to round ``num_rounds``, less far where the budget ends first (see ``stopped``).

        A run directory that was resumed is gone on with: ``initial_arrays`` then only say which
        model it is. ``evaluate_fn`` is called with the shared part of the model after each round,
        and before the first one with the number 0, but where a run is gone on with.

        Raises
        ------
        FederationNotReady
            Not all nodes are there, or no client ever sent anything of use.
        ValueError
            A name in ``personal`` is misspelt: that part would be shared.
        """
        self.summary()
        self._check_personal(sorted(initial_arrays))
        self._last_round = num_rounds
        result = Result()
        result.arrays, done = self._resume(grid, self.shared(initial_arrays), num_rounds)
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
                    self._last_round = server_round - 1
                    self._evaluate_at_last(grid, result, timeout, evaluate)
                    self._save_guarantees()
                    break
            if self.refusals and not (done or self._ever_answered):
                raise FederationNotReady(
                    f"no client ever sent anything of use; the first said: {self.refusals[0]}"
                )
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
        """One round: train, evaluate, write down."""
        started = time.monotonic()
        self.progress.begin()
        asked = self.configure_train(server_round, result.arrays, train_config, grid)
        answers = replies(grid, asked, timeout=timeout) if asked else []
        moved, metrics = self.aggregate_train(server_round, answers)
        if moved is not None:
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

    def _evaluate(
        self, server_round: int, grid: Grid, result: Result, timeout: float, config: ConfigRecord
    ) -> bool:
        """Ask for scores, where this round does; whether there are any."""
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
        """Evaluate on the server, as its owner asks for."""
        own = evaluate_fn(server_round, result.arrays)
        if own is not None:
            result.evaluate_metrics_serverapp[server_round] = own

    def _evaluate_at_last(
        self, grid: Grid, result: Result, timeout: float, config: ConfigRecord
    ) -> None:
        """Evaluate the round that turned out to be the last, if nobody has yet."""
        last = self._last_round
        if not last or self.progress.evaluated(last):
            return
        self.progress.row = {}
        if self._evaluate(last, grid, result, timeout, config):
            self.progress.row |= self.spent()
            self.progress.add(last)
            self._save(last, result.arrays)

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
        """Write ``guarantee.json``: what holds after the rounds so far."""
        run = self.checkpoints.run
        if run is not None and (guarantees := self.guarantees()):
            run.save_guarantees(guarantees)

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        """If the block fails, leave a guarantee that covers what was asked for until then."""
        try:
            yield
        except BaseException as error:
            try:
                with self.spending.closing() as release:  # what it reserved stays spent
                    release.discard(f"{type(error).__name__}: {error}")
                if (one := self.checkpoints.open) is not None:
                    self._count_abandoned(one)
                self._save_guarantees()
            except Exception:  # what ended the run is what counts
                log.exception("no guarantee could be written")
            raise

    # When it goes on ------------------------------------------------------------------------

    def _check_personal(self, names: Sequence[str]) -> None:
        """Refuse a misspelt part; warn where all are missing, as of a model that lacks them."""
        modules = {name.rsplit(".", 1)[0] for name in names} | {*names}
        unknown = [p for p in self.personal if not any(matches(name, [p]) for name in names)]
        if unknown and len(unknown) < len(self.personal):
            raise InvalidValue(
                f"personal={self.personal!r}: {unknown} name no part of the model, whose modules "
                f"are {sorted(modules - {*names})}. A part that is not named is shared"
            )
        for prefix in unknown:
            # Layers of other numbers are alike as well, and the server's model may lack this one.
            letters = prefix.translate(_NO_DIGITS)
            near = get_close_matches(prefix, modules)
            alike = [name for name in near if name.translate(_NO_DIGITS) != letters]
            if any(f".{prefix}." in f".{name}." for name in names):
                alike = [f"*.{prefix}"]
            if alike:
                raise InvalidValue(
                    f"personal={prefix!r} names no part of the model: did you mean {alike[0]!r}? "
                    "A part that is not named is shared"
                )
            log.warning("personal=%r names none of %s", prefix, names)

    def _resume(self, grid: Grid, initial: ArrayRecord, num_rounds: int) -> tuple[ArrayRecord, int]:
        """(model, rounds done) from which to go on; (``initial``, 0) where nothing was done.

        Raises
        ------
        Damaged
            No checkpoint is sound.
        ValueError
            The model is another one.
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
            if done < num_rounds:  # else nobody is needed any more
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
            "resumed after round %d; %d training rounds were asked for and not finished",
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
        """Ask all clients whether they remember what they knew at the checkpoint."""
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
                f"round {needed[lost[0]]}, now from {told[lost[0]] or 'none'}): the run cannot go "
                "on. Memory outlives a process where SuperNodes, or a simulation's settings, name "
                "a state-folder; a method that keeps none says ClientMethod(keeps_memory=False)"
            )


def _same_model(kept: records.Arrays, initial: ArrayRecord) -> ArrayRecord:
    shapes = {name: (array.shape, str(array.dtype)) for name, array in kept.items()}
    expected = {name: (tuple(array.shape), array.dtype) for name, array in initial.items()}
    if shapes != expected:
        raise InvalidValue(
            f"the checkpoint holds another model than the one that starts: arrays {sorted(shapes)}"
            f", expected {sorted(expected)} in the same shapes and types"
        )
    return records.to_record(kept)


def _read_version(reply: Message) -> int:
    told = records.read_answer(reply).get("version")
    if told is None or told.shape or not np.issubdtype(told.dtype, np.integer) or told < 0:
        raise records.RefusedReply("'version': expected the number of a training round")
    return int(told)
