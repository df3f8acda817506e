"""Run a strategy in two worlds, with a canary and without it, and bound its ε from below.

Nothing in a strategy is looked into: an adversary's view is what passes over the grid (uploads)
and what `Strategy.start` hands out after each round (models). Any Flower strategy can be audited;
the ε that it is held to is what its ``guarantees()`` print, or what the experiment names.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy

from flower_ext.evaluation import LowerBound, by_rates, if_gaussian
from flower_ext.federation import FederationNotReady, InProcessGrid, records, run_in_process
from flower_ext.federation.cohort import partition_of
from flower_ext.privacy import AdversaryView, Guarantee
from flower_ext.privacy.accounting import EXACT_GAUSSIAN

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one run shows.

    Parameters
    ----------
    models : Sequence[Arrays]
        The initial model, and the model after each round.
    sent, uploads : Sequence[Mapping[int, Arrays]]
        Of each round, by partition: the model that the client was sent, and what it sent back less
        that model.
    """

    models: Sequence[Arrays]
    sent: Sequence[Mapping[int, Arrays]]
    uploads: Sequence[Mapping[int, Arrays]]


Score = Callable[[Observation, AdversaryView], float]


def projected(
    direction: Arrays,
    *,
    signs: Sequence[float] = (1.0,),
    partitions: Sequence[int] | None = None,
    whole: bool = False,
) -> Score:
    """The score that is best against Gaussian noise: how far the canary's direction was gone.

    Parameters
    ----------
    direction : Arrays
        Of what the canary adds, by names of the model's arrays; others count as zero.
    signs : Sequence[float]
        By round, which way the canary pulls; of a shorter list the last one goes on.
    partitions : Sequence[int], optional
        Whose uploads the canary is in, for who sees each of them; by default all.
    whole : bool
        Uploads are whole models, of which what was sent must not be taken off.
    """
    wide = {name: np.asarray(array, dtype=np.float64) for name, array in direction.items()}

    def along(arrays: Arrays) -> float:
        return sum(float((arrays[name] * way).sum()) for name, way in wide.items())

    def upload(seen: Observation, number: int, partition: int) -> float:
        base = along(seen.sent[number][partition]) if whole else 0.0
        return base + along(seen.uploads[number][partition])

    def step(seen: Observation, view: AdversaryView, number: int) -> float:
        if view is AdversaryView.RELEASED_MODELS:
            return along(seen.models[number + 1]) - along(seen.models[number])
        own = seen.uploads[number]
        if view is AdversaryView.EACH_UPLOAD and partitions is not None:
            own = {partition: own[partition] for partition in partitions if partition in own}
        return sum(upload(seen, number, partition) for partition in own)

    def score(seen: Observation, view: AdversaryView) -> float:
        rounds = range(len(seen.models) - 1)
        return sum(
            signs[min(number, len(signs) - 1)] * step(seen, view, number) for number in rounds
        )

    return score


@dataclass(frozen=True, kw_only=True)
class World:
    """All that a run needs: what is equal in both worlds is given twice.

    Parameters
    ----------
    strategy : Callable[[], Strategy]
        Makes a fresh strategy for each trial. It should evaluate on no client, which takes time.
    client_app : ClientApp
    num_clients : int
    """

    strategy: Callable[[], Strategy]
    client_app: ClientApp
    num_clients: int
    run_config: Mapping[str, bool | float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Two worlds that differ in one unit, and what an adversary makes of a run.

    Choose the canary for the tight case: a unit whose part in an upload is a known direction of a
    norm far above the bound, among others that are still.

    Parameters
    ----------
    name : str
    without, present : World
        Without the canary, and with it. They must be neighbours under the relation of the ε.
    initial : ArrayRecord
        The first model.
    score : Score
        Of one run, for a view: higher where the canary seems to be present.
    rounds : int
    views : Sequence[AdversaryView]
        Those to audit; those without a finite ε are left out.
    printed : Mapping[AdversaryView, float], optional
        ε by view, for strategies without ``guarantees()``.
    delta : float, optional
        With ``printed``.
    gaussian : bool, optional
        Whether the mechanism is Gaussian, so that `if_gaussian` is a bound. By default where the
        guarantee's accountant says so.
    on_round : Callable[[int], None], optional
        Called before each training round, with its number: for a canary that acts by round.
    """

    name: str
    without: World
    present: World
    initial: ArrayRecord
    score: Score
    rounds: int = 1
    views: Sequence[AdversaryView] = tuple(AdversaryView)
    printed: Mapping[AdversaryView, float] | None = None
    delta: float | None = None
    gaussian: bool | None = None
    on_round: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds!r}: expected an integer >= 1")
        if not self.views:
            raise ValueError("views=(): expected at least one AdversaryView")
        if self.printed is not None and self.delta is None:
            raise ValueError("delta=None: expected the δ of the ε in printed")


@dataclass(frozen=True, kw_only=True)
class ViewAudit:
    """One adversary's view: the promise, the scores and the bounds from them.

    ``scores`` are those of the world without the canary, and with it.
    """

    view: AdversaryView
    printed: float
    delta: float
    bounds: tuple[LowerBound, ...]
    scores: tuple[np.ndarray, np.ndarray]

    @property
    def best(self) -> LowerBound:
        """The largest bound."""
        return max(self.bounds, key=lambda bound: bound.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, without the scores."""
        best = self.best
        return {
            "view": self.view.value,
            "printed_epsilon": self.printed,
            "delta": self.delta,
            "lower_bound": best.epsilon,
            "ratio": best.ratio,
            "exceeds": best.exceeds,
            "bounds": {bound.method: bound.epsilon for bound in self.bounds},
        }


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found; all its bounds hold at once with ``confidence``.

    ``trials`` were run in each world. ``views`` may be fewer than were asked for: a view without a
    finite ε promises nothing that could be broken.
    """

    name: str
    views: tuple[ViewAudit, ...]
    trials: int
    confidence: float
    seconds: float

    @property
    def broken(self) -> bool:
        """Whether a bound exceeds what is printed."""
        return any(view.best.exceeds for view in self.views)

    def of(self, view: AdversaryView) -> ViewAudit:
        """What was found for one view."""
        return next(each for each in self.views if each.view is view)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "name": self.name,
            "trials_per_world": self.trials,
            "joint_confidence": self.confidence,
            "seconds": self.seconds,
            "broken": self.broken,
            "views": [view.to_dict() for view in self.views],
        }


def audit(
    experiment: Experiment,
    *,
    trials: int,
    confidence: float = 0.95,
    together: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Run both worlds ``trials`` times each and bound ε from below, for each view.

    Parameters
    ----------
    confidence : float
        With which all bounds of this audit, and of ``together`` − 1 others like it, hold at once.
    together : int
        How many audits share what may fail.
    progress : Callable[[int, int], None], optional
        Told how many runs are done, of how many.

    Raises
    ------
    ValueError
        Too few trials, or no view of the experiment has a finite ε.
    """
    if trials < 8:
        raise ValueError(f"trials={trials!r}: expected an integer >= 8")
    started, done = time.monotonic(), 0
    scores: dict[AdversaryView, tuple[list[float], list[float]]] = {
        view: ([], []) for view in experiment.views
    }
    promises: dict[AdversaryView, tuple[float, float, bool]] = {}
    known: set[str] = set()

    def take(seen: Observation, strategy: Strategy) -> None:
        nonlocal done
        # Of several promises the largest counts: ε may depend on who was drawn, if that is seen.
        counted = getattr(strategy, "participations", None)
        facts = str(done) if counted is None else repr(vars(counted))
        if facts not in known:
            known.add(facts)
            for view, promise in promised(experiment, strategy).items():
                promises[view] = max(promise, promises.get(view, promise))
        for view in experiment.views:
            scores[view][0 if done < trials else 1].append(experiment.score(seen, view))
        done += 1
        if progress is not None:
            progress(done, 2 * trials)

    for world in (experiment.without, experiment.present):
        observe(experiment, world, take, trials=trials)
    views = [view for view in experiment.views if math.isfinite(promises[view][0])]
    if not views:
        raise ValueError(f"{experiment.name}: no view has a finite ε that could be exceeded")
    methods = {v: [by_rates, if_gaussian] if promises[v][2] else [by_rates] for v in views}
    company = together * sum(len(own) for own in methods.values())
    found = []
    for view in views:
        printed, delta, _ = promises[view]
        without, present = (np.asarray(own) for own in scores[view])
        bounds = [
            method(
                without,
                present,
                delta=delta,
                confidence=confidence,
                together=company,
                printed=printed,
            )
            for method in methods[view]
        ]
        found.append(
            ViewAudit(
                view=view,
                printed=printed,
                delta=delta,
                bounds=tuple(bounds),
                scores=(without, present),
            )
        )
    return Audit(
        name=experiment.name,
        views=tuple(found),
        trials=trials,
        confidence=confidence,
        seconds=time.monotonic() - started,
    )


def observe(
    experiment: Experiment,
    world: World,
    take: Callable[[Observation, Strategy], None],
    *,
    trials: int,
) -> None:
    """Hand over what an adversary sees in each trial, and the strategy; clients begin afresh."""
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        assert isinstance(grid, InProcessGrid)
        for _ in range(trials):
            for own in grid.contexts.values():
                own.state = RecordDict()
            take(*_trial(experiment, world, grid))

    with _quiet():
        run_in_process(
            server, world.client_app, num_clients=world.num_clients, run_config=world.run_config
        )


def _trial(
    experiment: Experiment, world: World, grid: InProcessGrid
) -> tuple[Observation, Strategy]:
    listener = _Listener(grid, experiment.on_round)
    initial = records.to_arrays(experiment.initial)
    models: dict[int, Arrays] = {0: _wide(initial)}

    def note(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        models[number] = _wide(records.to_arrays(arrays))
        if number < experiment.rounds:
            listener.begin(number + 1)
        return None

    strategy = world.strategy()
    listener.begin(1)
    try:
        strategy.start(
            listener,
            records.to_record(initial),
            num_rounds=experiment.rounds,
            evaluate_fn=note,
        )
    except FederationNotReady:
        if not any(listener.uploads):
            raise  # else all uploads were refused, which have been seen all the same
    released = [models[0]]
    for number in range(1, experiment.rounds + 1):  # one that released nothing left the model
        released.append(models.get(number, released[-1]))
    seen = Observation(models=released, sent=listener.sent, uploads=listener.uploads)
    return seen, strategy


def promised(
    experiment: Experiment, strategy: Strategy
) -> dict[AdversaryView, tuple[float, float, bool]]:
    """Return by view the provable ε, δ, and whether the mechanism is a Gaussian one."""
    if experiment.printed is not None:
        assert experiment.delta is not None
        gaussian = bool(experiment.gaussian)
        return {
            view: (experiment.printed.get(view, math.inf), experiment.delta, gaussian)
            for view in experiment.views
        }
    guarantees: Callable[[], Sequence[Guarantee]] | None = getattr(strategy, "guarantees", None)
    if guarantees is None:
        raise ValueError(
            f"{type(strategy).__name__} has no guarantees(): name its ε in Experiment.printed"
        )
    found = dict.fromkeys(experiment.views, (math.inf, 0.0, False))
    for own in guarantees():
        if own.basis == "provable" and own.view in found:
            gaussian = own.accountant == EXACT_GAUSSIAN
            if experiment.gaussian is not None:
                gaussian = experiment.gaussian
            found[own.view] = (own.epsilon, own.delta, gaussian)
    return found


class _Listener(Grid):
    """A grid that notes what clients upload in training."""

    def __init__(self, grid: InProcessGrid, on_round: Callable[[int], None] | None) -> None:
        self._grid, self._on_round = grid, on_round
        self.sent: list[dict[int, Arrays]] = []
        self.uploads: list[dict[int, Arrays]] = []

    def begin(self, number: int) -> None:
        """Begin a round, in which perhaps nobody is asked."""
        if number > len(self.uploads):
            self.sent.append({})
            self.uploads.append({})
            if self._on_round is not None:
                self._on_round(number)

    def set_run(self, run: Any) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        return self._grid.run

    def create_message(self, *args: Any, **options: Any) -> Message:
        return self._grid.create_message(*args, **options)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        asked = list(messages)
        trains = [m for m in asked if m.metadata.message_type.partition(".")[0] == "train"]
        if not trains:
            return self._grid.send_and_receive(asked, timeout=timeout)
        sent = {m.metadata.dst_node_id: _arrays(m.content.get(records.MODEL)) for m in trains}
        replies = list(self._grid.send_and_receive(asked, timeout=timeout))
        self.sent[-1].update({self._partition(node): base for node, base in sent.items()})
        for reply in replies:
            node = reply.metadata.src_node_id
            if (own := _upload(reply, sent.get(node, {}))) is not None:
                self.uploads[-1][self._partition(node)] = own
        return replies

    def _partition(self, node: int) -> int:
        return partition_of(self._grid.contexts[node].node_config)


def _upload(reply: Message, sent: Arrays) -> Arrays | None:
    """What a client sent less the model that it was sent; None for an error, or other content."""
    if reply.has_error():
        return None
    if records.UPDATE in reply.content:
        return _arrays(reply.content[records.UPDATE])
    model = _arrays(reply.content.get(records.MODEL))
    return {name: value - sent.get(name, 0.0) for name, value in model.items()}


def _arrays(record: object) -> Arrays:
    return _wide(records.to_arrays(record)) if isinstance(record, ArrayRecord) else {}


def _wide(arrays: Arrays) -> Arrays:
    return {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}


@contextmanager
def _quiet() -> Iterator[None]:
    """Thousands of runs would each log their rounds."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
