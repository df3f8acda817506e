"""Replace functions of Flower, Opacus and this package, so that the check can watch an app's runs.

The replaced functions report the mods, strategies and privacy engines that an app makes. In a held
run (`held_run`) they also replace what clients would learn from data. The package offers no hook
for this purpose, because a hook that can take the noise away would weaken every run.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flower_ext.algorithms import Upcycled
from flower_ext.check.held_run import TRAIN, HeldRun
from flower_ext.check.observe import Watch
from flower_ext.data import ClientData
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.client import preparing, upload
from flower_ext.federation.client.app import CohortApp
from flower_ext.federation.client.client_method import ClientWork
from flower_ext.federation.client.preparing import NO_DATA
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.round import Round
from flower_ext.privacy import NoiseSource
from flower_ext.training import Task

Wrapper = Callable[..., Any]
"""A function that is called in place of an original one, which is its first argument."""
_CATEGORIES = (TRAIN, "evaluate", "query")
_NOISE = ("add_gaussian", "gaussian", "add_discrete_gaussian")


@dataclass(kw_only=True)
class Instruments:
    """Changes to functions of Flower, Opacus and this package, made before an app is loaded."""

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

    def seams(self) -> list[tuple[Any, str, Wrapper]]:
        """Return (owner, name, wrapper) for each function that `install` changes.

        `limit_rounds` and `count_engines` change further functions, after the app is loaded.
        """
        return [
            # Every ClientApp reports its mods, and gets a mod of the check as the innermost one.
            (ClientApp, "__init__", self._with_mod),
            *((ClientApp, category, self._registered) for category in _CATEGORIES),
            # In a held run, clients of this package train without data, which also saves time.
            (preparing, "checked_data", self._data),
            (upload, "result_hiding_failures", self._result),
            # In a held run, a public update replaces each update before the client protects it.
            (upload, "protected", self._protected),
            # In a held run that is quiet (`HeldRun.quiet`), noise sources add no noise.
            *((NoiseSource, name, self._noised) for name in _NOISE),
            # Each round of a strategy of this package reports the mean that it releases.
            (Round, "close", self._closed),
        ]

    def install(self) -> None:
        """Change all functions of `seams`."""
        for owner, name, wrapper in self.seams():
            wrap(owner, name, wrapper)

    def _with_mod(
        self, begin: Any, app: ClientApp, client_fn: Any = None, mods: Any = None, **more: Any
    ) -> None:
        vars(app)["watched_mods"] = outer = list(mods or [])
        if client_fn is not None:
            self.mods.update(dict.fromkeys(_CATEGORIES, outer))
        begin(app, client_fn, [*outer, self._inner] if client_fn else outer, **more)

    def _registered(
        self, register: Any, app: ClientApp, action: str = "default", *, mods: Any = None
    ) -> Any:
        self.mods[register.__name__] = [*vars(app).get("watched_mods", ()), *(mods or [])]
        if isinstance(app, CohortApp):
            return register(app, action, mods=mods)
        return register(app, action, mods=[*(mods or []), self._inner])

    def _inner(self, message: Message, context: Context, call_next: Any) -> Message:
        assert self.watch is not None
        return self.watch.inner(message, context, call_next)

    def _data(
        self, load: Callable[..., ClientData], task: Task, request: ClientRequest, partition: int
    ) -> ClientData:
        if self.watch is not None and self.watch.holds_data(request, partition):
            return NO_DATA
        return load(task, request, partition)

    def _result(self, run: Callable[..., Any], work: ClientWork) -> Any:
        if self.watch is not None and (held := self.watch.held) is not None:
            work = held.work(work, self.watch.answering)
        return run(work)

    def _protected(
        self, protect: Callable[..., Any], update: Any, received: Any, protection: Any, noise: Any
    ) -> Any:
        if self.watch is not None and (held := self.watch.held) is not None:
            update = held.contribution(update, received, protection, self.watch.answering)
        return protect(update, received, protection, noise)

    def _noised(
        self, add: Any, source: NoiseSource, value: Any, stddev: float, **options: Any
    ) -> Any:
        if self.held_run is None or not self.held_run.quiet:
            return add(source, value, stddev, **options)
        return add(source, value, 0.0) if add.__name__ == "gaussian" else dict(value)

    def _closed(self, close: Callable[..., Any], round: Round, replies: Any, **options: Any) -> Any:
        mean = close(round, replies, **options)
        if self.watch is not None and mean is not None and round.kind == TRAIN:
            self.watch.mean(mean.value)
        return mean

    def limit_rounds(self, rounds: int) -> None:
        """Make every strategy stop after ``rounds`` rounds, and record how many the app planned."""
        kinds = [Strategy]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
        for kind in set(kinds):
            if "start" in vars(kind):
                wrap(kind, "start", partial(self._limited, rounds))

    def _limited(
        self, rounds: int, start: Any, strategy: Strategy, *arguments: Any, **options: Any
    ) -> Any:
        watch = self.watch
        if watch is None or watch.in_strategy:
            return start(strategy, *arguments, **options)
        call = inspect.signature(start).bind(strategy, *arguments, **options)
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
                # No comparison needs scores.
                part.run.options = replace(part.run.options, evaluate_every=0)
        self.strategies.extend(chain)
        self.begun.extend(copy(part) for part in chain)
        watch.in_strategy = True
        result = start(*call.args, **call.kwargs)
        watch.in_strategy = False
        if arrays := getattr(result, "arrays", None):
            watch.release(array.numpy() for array in arrays.values())
        return result

    def count_engines(self) -> None:
        """Count the privacy engines of Opacus that each client makes.

        Each engine has a new accountant, which does not know the rounds before it.
        """
        from opacus import PrivacyEngine

        wrap(PrivacyEngine, "make_private", self._engine)

    def _engine(self, make: Any, engine: Any, *arguments: Any, **options: Any) -> Any:
        if self.watch is not None:
            self.engines[self.watch.answering] += 1
        return make(engine, *arguments, **options)


def wrap(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Call ``wrapper(original, ...)`` in place of a function, or a method, of ``owner``."""
    original = getattr(owner, name)

    @wraps(original)
    def called(*arguments: Any, **options: Any) -> Any:
        return wrapper(original, *arguments, **options)

    setattr(owner, name, called)


def chain_of(strategy: Strategy) -> list[Strategy]:
    """Return a strategy and the strategies that it wraps, the outermost first."""
    chain: list[Strategy] = []
    inner: Any = strategy
    while isinstance(inner, Strategy) and inner not in chain:
        chain.append(inner)
        inner = getattr(inner, "strategy", None) or getattr(inner, "base", None)
    return chain
