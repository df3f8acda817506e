"""Make Flower's and Opacus's classes report the mods, strategies and engines that an app makes."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.algorithms import Upcycled
from flower_ext.check.held_run import TRAIN, HeldRun
from flower_ext.check.observe import Watch
from flower_ext.data import ClientData
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.client import preparing, protecting
from flower_ext.federation.client.client_method import ClientWork
from flower_ext.federation.client.cohort_app import CohortApp
from flower_ext.federation.client.preparing import NO_DATA
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.round import Round
from flower_ext.privacy import NoiseSource
from flower_ext.training import Task


@dataclass(kw_only=True)
class Instruments:
    """Changes to classes of Flower and of this package, made before the check loads an app."""

    mods: dict[str, list[Any]] = field(default_factory=dict)
    """Mods of each category of messages, the outermost first."""
    strategies: list[Strategy] = field(default_factory=list)
    """The strategy that runs the rounds, and the strategies that it wraps."""
    begun: list[Strategy] = field(default_factory=list)
    """Copies of ``strategies``, made before the first round."""
    engines: Counter[int] = field(default_factory=Counter)
    """Number of privacy engines of Opacus that each client made."""
    watch: Watch | None = None

    @property
    def held_run(self) -> HeldRun | None:
        """The held run that is being watched; None in the first run, in which clients learn."""
        return None if self.watch is None else self.watch.held

    def install(self) -> None:
        """Make each ClientApp report its mods, and add a mod of the check after all of them."""
        begin = ClientApp.__init__

        def started(
            app: ClientApp, client_fn: Any = None, mods: list[Any] | None = None, **more: Any
        ) -> None:
            vars(app)["watched_mods"] = outer = list(mods or [])
            if client_fn is not None:
                self.mods.update(dict.fromkeys((TRAIN, "evaluate", "query"), outer))
            begin(app, client_fn, [*outer, self._inner] if client_fn else outer, **more)

        ClientApp.__init__ = started  # type: ignore[method-assign, assignment]
        for category in (TRAIN, "evaluate", "query"):
            self._instrument(category)
        self._hold_work()
        self._hold_contributions()
        self._watch_means()
        for name in ("add_gaussian", "gaussian", "add_discrete_gaussian"):
            self._quieten(name)

    def _hold_work(self) -> None:
        """Make clients of this package train without data in a held run, which also saves time."""
        load, train = preparing.checked_data, protecting.result_hiding_failures

        def loaded(task: Task, request: ClientRequest, partition: int) -> ClientData:
            if self.watch is not None and self.watch.holds_data(request, partition):
                return NO_DATA
            data: ClientData = load(task, request, partition)
            return data

        def held(work: ClientWork) -> Any:
            held_run = self.held_run
            return train(work if held_run is None else held_run.work(work))

        preparing.checked_data = loaded
        protecting.result_hiding_failures = held

    def _watch_means(self) -> None:
        """Record the mean that each round of a strategy of this package releases."""
        close = Round.close

        @wraps(close)
        def closed(round: Round, replies: Any, **options: Any) -> Any:
            mean, updates = close(round, replies, **options)
            if self.watch is not None and mean is not None and round.kind == TRAIN:
                self.watch.mean(mean.value)
            return mean, updates

        Round.close = closed  # type: ignore[method-assign, assignment]

    def _hold_contributions(self) -> None:
        """In a held run, replace each update by a public one before the client protects it."""
        protect = protecting.protected

        def held(update: Any, received: Any, protection: Any, noise: Any) -> Any:
            if self.watch is not None and self.watch.held is not None:
                client = self.watch.answering
                update = self.watch.held.contribution(update, received, protection, client)
            return protect(update, received, protection, noise)

        protecting.protected = held

    def _quieten(self, name: str) -> None:
        """Make the method ``name`` of noise sources add no noise in a held run that is quiet."""
        add = getattr(NoiseSource, name)

        def added(source: NoiseSource, value: Any, stddev: float, **options: Any) -> Any:
            if self.held_run is None or not self.held_run.quiet:
                return add(source, value, stddev, **options)
            return add(source, value, 0.0) if name == "gaussian" else dict(value)

        setattr(NoiseSource, name, added)

    def _instrument(self, category: str) -> None:
        register = getattr(ClientApp, category)

        def registered(
            app: ClientApp, action: str = "default", *, mods: list[Any] | None = None
        ) -> Any:
            self.mods[category] = [*vars(app).get("watched_mods", ()), *(mods or [])]
            if isinstance(app, CohortApp):
                return register(app, action, mods=mods)
            return register(app, action, mods=[*(mods or []), self._inner])

        setattr(ClientApp, category, registered)

    def _inner(self, message: Message, context: Context, call_next: Any) -> Message:
        assert self.watch is not None
        return self.watch.inner(message, context, call_next)

    def limit_rounds(self, rounds: int) -> None:
        """Make every strategy stop after ``rounds`` rounds, and report its planned number."""
        kinds = [Strategy]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
        for kind in set(kinds):
            if "start" in vars(kind):
                kind.start = self._limited(vars(kind)["start"], rounds)  # type: ignore[method-assign]

    def _limited(self, start: Callable[..., Result], rounds: int) -> Callable[..., Result]:
        signature = inspect.signature(start)

        @wraps(start)
        def limited(strategy: Strategy, *arguments: Any, **options: Any) -> Result:
            watch = self.watch
            if watch is None or watch.in_strategy:
                return start(strategy, *arguments, **options)
            call = signature.bind(strategy, *arguments, **options)
            call.apply_defaults()
            # A strategy that wraps another may take the options of the inner one as keywords.
            named = next(
                (v for v in call.arguments.values() if isinstance(v, dict) and "num_rounds" in v),
                call.arguments,
            )
            planned = int(named.get("num_rounds", 3))
            named["num_rounds"] = min(planned, rounds)
            chain = chain_of(strategy)
            halves = any(type(part) is Upcycled for part in chain)  # even rounds train nobody
            watch.observed.planned += math.ceil(planned / 2) if halves else planned
            watch.observed.starts += 1
            for part in chain:
                if watch.held is not None and isinstance(part, FederatedStrategy):
                    part.run.evaluate_every = 0  # no comparison needs scores
            self.strategies.extend(chain)
            self.begun.extend(copy(part) for part in chain)
            watch.in_strategy = True
            result = start(*call.args, **call.kwargs)
            watch.in_strategy = False
            watch.finish(result)
            return result

        return limited

    def count_engines(self) -> None:
        """Count the privacy engines that each client makes; each has an accountant of its own."""
        from opacus import PrivacyEngine

        make = PrivacyEngine.make_private

        @wraps(make)
        def counted(engine: Any, *arguments: Any, **options: Any) -> Any:
            if self.watch is not None:
                self.engines[self.watch.answering] += 1
            return make(engine, *arguments, **options)

        PrivacyEngine.make_private = counted


def chain_of(strategy: Strategy) -> list[Strategy]:
    """Return a strategy and the strategies that it wraps, the outermost first."""
    chain: list[Strategy] = []
    inner: Any = strategy
    while isinstance(inner, Strategy) and inner not in chain:
        chain.append(inner)
        inner = getattr(inner, "strategy", None) or getattr(inner, "base", None)
    return chain
