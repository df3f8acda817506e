"""Run a strategy in two worlds, with a canary and without it, and bound its ε from below.

Nothing in a strategy is looked into: an adversary's view is what passes over the grid (uploads)
and what `Strategy.start` hands out after each round (models). Any Flower strategy can be audited;
the ε that it is held to is what its ``guarantees()`` print, or what the experiment names.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy

from flower_ext.auditing.experiment import Experiment, Observation
from flower_ext.auditing.observing import observe
from flower_ext.errors import InvalidValue
from flower_ext.evaluation import LowerBound, by_rates, if_gaussian
from flower_ext.privacy import AdversaryView, Guarantee
from flower_ext.privacy.accounting import EXACT_GAUSSIAN


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
        raise InvalidValue(f"trials={trials!r}: expected an integer >= 8")
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
        raise InvalidValue(f"{experiment.name}: no view has a finite ε that could be exceeded")
    methods = {v: [by_rates, if_gaussian] if promises[v][2] else [by_rates] for v in views}
    company = together * sum(len(own) for own in methods.values())
    found = []
    for view in views:
        printed, delta, _ = promises[view]
        without, present = (np.asarray(own) for own in scores[view])
        stated = {"delta": delta, "confidence": confidence, "printed": printed}
        bounds = tuple(
            method(without, present, together=company, **stated) for method in methods[view]
        )
        worlds = without, present
        found.append(
            ViewAudit(view=view, printed=printed, delta=delta, bounds=bounds, scores=worlds)
        )
    return Audit(
        name=experiment.name,
        views=tuple(found),
        trials=trials,
        confidence=confidence,
        seconds=time.monotonic() - started,
    )


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
        raise InvalidValue(
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
