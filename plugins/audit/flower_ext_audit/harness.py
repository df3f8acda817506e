"""Run a strategy in two worlds, with and without a canary, and bound its ε from below.

An audit works with any Flower strategy, because it only observes runs. Its adversary sees the
uploads on the grid and the model after each round of `Strategy.start`. The audit tests the ε in the
strategy's ``guarantees()``, or the ε that the experiment names. `audit_in_one_run` is cheap but far
looser: it includes each of many canaries with probability one half.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from flower_ext.errors import InvalidValue
from flower_ext.privacy import AdversaryView, Guarantee, secure_generator
from flower_ext.privacy.accounting.gaussian import EXACT_GAUSSIAN
from flower_ext_audit.experiment import Experiment, Observation, World
from flower_ext_audit.lower_bounds import BoundTerms, LowerBound, by_rates, if_gaussian
from flower_ext_audit.observing import observe
from flower_ext_audit.one_run import in_one_run, in_one_run_by_curve

Scores = tuple[list[float], list[float]]
"""The scores of the runs without the canary, and of the runs with it."""


class ReportedEpsilon(NamedTuple):
    """The provable ε and δ that a strategy reports for one view; ε is infinite without a report."""

    epsilon: float
    delta: float
    gaussian: bool


@dataclass(frozen=True, kw_only=True)
class ViewAudit:
    """The lower bounds on ε that an audit found for one adversary's view."""

    view: AdversaryView
    bounds: tuple[LowerBound, ...]

    @property
    def best(self) -> LowerBound:
        """The largest lower bound. Its ``terms`` hold the ε and δ that the strategy reports."""
        return max(self.bounds, key=lambda bound: bound.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a JSON-ready dictionary."""
        best = self.best
        return {
            "view": self.view.value,
            "reported_epsilon": best.terms.reported,
            "delta": best.terms.delta,
            "lower_bound": best.epsilon,
            "ratio": best.ratio,
            "exceeds": best.exceeds,
            "bounds": {bound.method: bound.epsilon for bound in self.bounds},
        }


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Results of an audit; all its bounds hold at once with ``confidence``.

    The audit ran ``trials`` trials in each world. ``views`` holds only views with a finite ε,
    because no audit can contradict an infinite ε.
    """

    name: str
    views: tuple[ViewAudit, ...]
    trials: int
    confidence: float
    seconds: float

    @property
    def broken(self) -> bool:
        """True if a lower bound exceeds the reported ε, and so proves that this ε is wrong."""
        return any(view.best.exceeds for view in self.views)

    def of(self, view: AdversaryView) -> ViewAudit:
        """Return the results for one view."""
        return next(audit for audit in self.views if audit.view is view)

    def to_dict(self) -> dict[str, Any]:
        """Return the results as a JSON-ready dictionary."""
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
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Run the experiment ``trials`` times in each world, and bound ε from below for each view.

    Parameters
    ----------
    confidence : float
        Probability that all bounds of this audit hold at once.
    progress : Callable[[int, int], None], optional
        Called with the number of finished runs and the number of all runs.

    Raises
    ------
    ValueError
        There are too few trials, or no view of the experiment has a finite ε.
    """
    if trials < 8:
        raise InvalidValue(f"trials={trials!r}: expected an integer >= 8")
    started = time.monotonic()
    reported, scores = _collect(experiment, trials, progress)
    return Audit(
        name=experiment.name,
        views=_bounds(experiment, reported, scores, confidence),
        trials=trials,
        confidence=confidence,
        seconds=time.monotonic() - started,
    )


def _collect(
    experiment: Experiment, trials: int, progress: Callable[[int, int], None] | None
) -> tuple[dict[AdversaryView, ReportedEpsilon], dict[AdversaryView, Scores]]:
    """Run the experiment in both worlds; return, by view, the largest reported ε and all scores."""
    done = 0
    scores: dict[AdversaryView, Scores] = {view: ([], []) for view in experiment.views}
    reported: dict[AdversaryView, ReportedEpsilon] = {}
    known: set[str] = set()
    for number, world in enumerate((experiment.without, experiment.present)):
        for seen, strategy in observe(experiment, world, trials=trials):
            # If the drawn units are visible, ε may depend on them, so the largest ε counts.
            counted = getattr(strategy, "participations", None)
            participations = str(done) if counted is None else repr(vars(counted))
            if participations not in known:
                known.add(participations)
                for view, claim in reported_epsilons(experiment, strategy).items():
                    reported[view] = max(claim, reported.get(view, claim))
            for view, of_worlds in scores.items():
                of_worlds[number].append(experiment.score(seen, view))
            done += 1
            if progress is not None:
                progress(done, 2 * trials)
    return reported, scores


def _bounds(
    experiment: Experiment,
    reported: Mapping[AdversaryView, ReportedEpsilon],
    scores: Mapping[AdversaryView, Scores],
    confidence: float,
) -> tuple[ViewAudit, ...]:
    """Return the lower bounds of each view with a finite ε; all hold at once."""
    views = [view for view in experiment.views if math.isfinite(reported[view].epsilon)]
    if not views:
        raise InvalidValue(
            f"{experiment.name}: none of the views has a finite ε to audit; add a view for which "
            "the strategy reports a finite ε, or add noise to the plan"
        )
    num_bounds = sum(1 + reported[view].gaussian for view in views)
    audits = []
    for view in views:
        claim, (without, present) = reported[view], scores[view]
        terms = BoundTerms(
            delta=claim.delta,
            confidence=confidence,
            num_bounds=num_bounds,
            reported=claim.epsilon,
        )
        methods = [by_rates, if_gaussian] if claim.gaussian else [by_rates]
        bounds = tuple(method(without, present, terms) for method in methods)
        audits.append(ViewAudit(view=view, bounds=bounds))
    return tuple(audits)


def reported_epsilons(
    experiment: Experiment, strategy: Strategy
) -> dict[AdversaryView, ReportedEpsilon]:
    """Return the ε that a strategy reports, by adversary's view."""
    if experiment.reported is not None:
        delta, gaussian = experiment.delta or 0.0, bool(experiment.gaussian)
        return {
            view: ReportedEpsilon(experiment.reported.get(view, math.inf), delta, gaussian)
            for view in experiment.views
        }
    guarantees: Callable[[], Sequence[Guarantee]] | None = getattr(strategy, "guarantees", None)
    if guarantees is None:
        raise InvalidValue(
            f"{type(strategy).__name__} has no guarantees(): give its ε in Experiment.reported"
        )
    reported = dict.fromkeys(experiment.views, ReportedEpsilon(math.inf, 0.0, False))
    for guarantee in guarantees():
        if guarantee.basis == "provable" and guarantee.view in reported:
            gaussian = guarantee.accountant == EXACT_GAUSSIAN
            if experiment.gaussian is not None:
                gaussian = experiment.gaussian
            reported[guarantee.view] = ReportedEpsilon(guarantee.epsilon, guarantee.delta, gaussian)
    return reported


def audit_in_one_run(
    world: Callable[[np.ndarray], World],
    *,
    initial: ArrayRecord,
    scores: Callable[[Observation], np.ndarray],
    canaries: int,
    guesses: int,
    view: AdversaryView,
    rounds: int = 1,
    confidence: float = 0.95,
) -> ViewAudit:
    """Bound ε from below by one run with many canaries; the strategy needs ``guarantees()``.

    `in_one_run` always gives a bound. If the reported ε is that of a Gaussian mechanism,
    `in_one_run_by_curve` gives a second bound, which is usually larger. The two bounds hold at
    once with ``confidence``. They are far looser than the bounds of `audit`, which takes thousands
    of runs: canaries disturb each other, and few guesses prove little even if all are correct.

    Parameters
    ----------
    world : Callable[[numpy.ndarray], World]
        Takes an array of ``canaries`` booleans, and returns the world that includes the canaries
        for which the array is True.
    scores : Callable[[Observation], numpy.ndarray]
        Returns an array of ``canaries`` scores; a canary's score is higher if the canary seems to
        be included.
    canaries : int
        Number of canaries.
    guesses : int
        Number of canaries whose inclusion is guessed: even, from 2 to ``canaries``.

    Raises
    ------
    ValueError
        The view has no finite ε, or `in_one_run` refuses an argument.
    """
    # The bound assumes that nobody can predict the coins, so they come from the secure source.
    included = secure_generator().random(canaries) < 0.5
    both = world(included)
    # Only one world is ever run; the experiment carries views and rounds.
    experiment = Experiment(
        name="one run",
        without=both,
        present=both,
        initial=initial,
        score=lambda seen, view: 0.0,
        rounds=rounds,
        views=[view],
    )
    ((seen, strategy),) = observe(experiment, both, trials=1)
    claim = reported_epsilons(experiment, strategy)[view]
    if math.isinf(claim.epsilon):
        raise InvalidValue(f"view={view.value!r}: expected a view with a finite ε")
    terms = BoundTerms(delta=claim.delta, confidence=confidence, reported=claim.epsilon)
    methods = [in_one_run, in_one_run_by_curve] if claim.gaussian else [in_one_run]
    values = scores(seen)
    bounds = tuple(method(values, included, terms, guesses=guesses) for method in methods)
    return ViewAudit(view=view, bounds=bounds)
