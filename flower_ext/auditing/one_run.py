"""A cheap audit: many canaries in one run, each included with probability one half."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy

from flower_ext.auditing.experiment import Experiment, Observation, World
from flower_ext.auditing.harness import promises_of
from flower_ext.auditing.observing import observe
from flower_ext.errors import InvalidValue
from flower_ext.metrics import BoundTerms, LowerBound, in_one_run
from flower_ext.privacy import AdversaryView, secure_generator


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
) -> LowerBound:
    """Bound ε of a strategy with ``guarantees()`` by one run (Steinke, Nasr, Jagielski 2023).

    It is far looser than `audit`, which takes thousands of runs: canaries disturb each other, and m
    canaries prove an ε of at most about log m.

    Parameters
    ----------
    world : Callable[[numpy.ndarray], World]
        Returns the world with the canaries that a mask (m,) selects.
    scores : Callable[[Observation], numpy.ndarray]
        Returns one score per canary (m,), higher if it seems to be included.
    guesses : int
        Number of canaries whose inclusion is guessed: even, from 2 to ``canaries``.

    Raises
    ------
    ValueError
        The view has no finite ε; also as `in_one_run`.
    """
    # The bound holds for fair coins that nobody can predict, so they come from the secure source.
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
    bounds: list[LowerBound] = []

    def take(seen: Observation, strategy: Strategy) -> None:
        promise = promises_of(experiment, strategy)[view]
        if math.isinf(promise.epsilon):
            raise InvalidValue(f"view={view.value!r}: expected a view with a finite ε")
        terms = BoundTerms(delta=promise.delta, confidence=confidence, reported=promise.epsilon)
        bounds.append(in_one_run(scores(seen), included, terms, guesses=guesses))

    observe(experiment, both, take, trials=1)
    return bounds[0]
