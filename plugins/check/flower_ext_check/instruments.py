"""Learn which mods, strategies and privacy engines an app makes, and limit the app's rounds."""

import inspect
import math
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flower_ext.algorithms import Upcycled
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.client.app import CohortApp
from flower_ext_check.held_run import TRAIN
from flower_ext_check.observe import Watch
from flower_ext_check.wrapping import Patch, wrap

_CATEGORIES = (TRAIN, "evaluate", "query")


@dataclass(kw_only=True)
class Instruments:
    """Changes to functions of Flower, Opacus and this package, made before an app is loaded."""

    mods: dict[str, list[Any]] = field(default_factory=dict)
    """Mods of each category of messages, the outermost first."""
    strategies: list[Strategy] = field(default_factory=list)
    """The strategy that runs the rounds, and the strategies that it wraps."""
    initial_strategies: list[Strategy] = field(default_factory=list)
    """Copies of ``strategies``, made before the first round."""
    engines: Counter[int] = field(default_factory=Counter)
    """Number of privacy engines of Opacus that each client made."""
    watch: Watch | None = None

    def patches(self) -> list[Patch]:
        """Return the functions to replace: each ClientApp reports its mods, and gets one more mod.

        The mod of the check is the innermost one. `limit_rounds` and `count_engines` replace
        further functions, after the app is loaded.
        """
        return [
            (ClientApp, "__init__", self._with_mod),
            *((ClientApp, category, self._registered) for category in _CATEGORIES),
        ]

    def install(self) -> None:
        """Replace all functions of `patches`."""
        for patch in self.patches():
            wrap(*patch)

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
        return self.watch.reply_inside_mods(message, context, call_next)

    def limit_rounds(self, rounds: int) -> None:
        """Stop every strategy after ``rounds`` rounds, and record how many the app planned."""
        kinds = [Strategy]
        for kind in kinds:
            kinds.extend(kind.__subclasses__())
        for kind in set(kinds):
            if "start" in vars(kind):
                wrap(kind, "start", partial(self._start_limited, rounds))

    def _start_limited(
        self, rounds: int, start: Any, strategy: Strategy, *arguments: Any, **options: Any
    ) -> Any:
        """Start a strategy; limit it to ``rounds`` rounds unless another strategy starts it."""
        watch = self.watch
        if watch is None or watch.in_strategy:
            return start(strategy, *arguments, **options)
        call = inspect.signature(start).bind(strategy, *arguments, **options)
        call.apply_defaults()
        # A strategy that wraps another may take that one's options as keywords.
        named = next(
            (v for v in call.arguments.values() if isinstance(v, dict) and "num_rounds" in v),
            call.arguments,
        )
        planned = int(named.get("num_rounds", 3))
        named["num_rounds"] = min(planned, rounds)
        self._note_start(watch, chain_of(strategy), planned)
        watch.in_strategy = True
        result = start(*call.args, **call.kwargs)
        watch.in_strategy = False
        if arrays := getattr(result, "arrays", None):
            watch.note_model(array.numpy() for array in arrays.values())
        return result

    def _note_start(self, watch: Watch, chain: Sequence[Strategy], planned: int) -> None:
        """Record the start of a strategy, with those that it wraps, for ``planned`` rounds."""
        trains_in_odd_rounds = any(type(part) is Upcycled for part in chain)
        watch.observed.planned_rounds += math.ceil(planned / 2) if trains_in_odd_rounds else planned
        watch.observed.strategy_starts += 1
        for part in chain:
            if watch.held is not None and isinstance(part, FederatedStrategy):
                # Skip evaluation: the check compares no scores of held runs.
                part.run.options = replace(part.run.options, evaluate_every=0)
        self.strategies.extend(chain)
        self.initial_strategies.extend(copy(part) for part in chain)

    def count_engines(self) -> None:
        """Count the privacy engines of Opacus that each client makes.

        Each engine has a new accountant, which does not know the rounds before it.
        """
        from opacus import PrivacyEngine

        wrap(PrivacyEngine, "make_private", self._count_engine)

    def _count_engine(self, make: Any, engine: Any, *arguments: Any, **options: Any) -> Any:
        if self.watch is not None:
            self.engines[self.watch.answering] += 1
        return make(engine, *arguments, **options)


def chain_of(strategy: Strategy) -> list[Strategy]:
    """Return a strategy and the strategies that it wraps, the outermost first."""
    chain: list[Strategy] = []
    inner: Any = strategy
    while isinstance(inner, Strategy) and inner not in chain:
        chain.append(inner)
        inner = getattr(inner, "strategy", None) or getattr(inner, "base", None)
    return chain
