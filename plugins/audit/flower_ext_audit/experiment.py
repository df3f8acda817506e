"""Two situations (*worlds*) that differ in one unit's data, and scores that tell them apart.

That unit is the *canary*: its data are present in one world and absent in the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.privacy import AdversaryView

Arrays = Mapping[str, np.ndarray]
NEXT_NORM = "log-next-clipping-norm"
"""Array in a released model with the logarithm of the next round's adaptive clipping norm."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An adversary's observations of one run.

    Parameters
    ----------
    models : Sequence[Arrays]
        The initial model, and the model after each round. If the clipping norm adapts, each model
        also holds the logarithm of the next round's norm, under the name `NEXT_NORM`.
    sent, uploads : Sequence[Mapping[int, Arrays]]
        For each round, by partition: the model that the client received, and its reply minus that
        model. In a round with a secure sum, ``uploads`` holds the masked bytes.
    scores : Sequence[Mapping[str, float]]
        Means that evaluations released, by round; empty for a round without evaluation.
    sums : Sequence[Arrays | None]
        For each round, the secure sum that the server computes, in units of the sum's rounding
        step; None for a round without a secure sum.
    bare : Sequence[Mapping[int, Arrays]]
        For each round, by partition: the uploads to the secure sum that the server can read in the
        clear, in the units of ``sums``.
    """

    models: Sequence[Arrays]
    sent: Sequence[Mapping[int, Arrays]]
    uploads: Sequence[Mapping[int, Arrays]]
    scores: Sequence[Mapping[str, float]] = ()
    sums: Sequence[Arrays | None] = ()
    bare: Sequence[Mapping[int, Arrays]] = ()


Score = Callable[[Observation, AdversaryView], float]


def projected(
    direction: Arrays,
    *,
    signs: Sequence[float] = (1.0,),
    partitions: Sequence[int] | None = None,
    whole: bool = False,
) -> Score:
    """Return a score that projects an observation on the canary's direction.

    Under Gaussian noise, no other score separates runs with and without the canary better. In
    a secure round, this score projects the sum that the server computes. If no mask hides an upload
    of the canary, the score projects that upload instead.

    Parameters
    ----------
    direction : Arrays
        Direction of the canary's contribution: arrays with the names that they have in models and
        uploads. The score ignores an array that is missing here, or in what the adversary sees.
    signs : Sequence[float]
        For each round, the sign with which the canary moves the model along ``direction``. If the
        list is shorter than the run, its last sign holds for all later rounds.
    partitions : Sequence[int], optional
        Partitions whose uploads contain the canary, for an adversary that reads single uploads; by
        default all.
    whole : bool
        True if uploads are whole models. The score then undoes the subtraction of the sent model.
    """
    wide = {name: np.asarray(array, dtype=np.float64) for name, array in direction.items()}

    def along(arrays: Arrays) -> float:
        return sum(float((arrays[n] * axis).sum()) for n, axis in wide.items() if n in arrays)

    def upload(seen: Observation, number: int, partition: int) -> float:
        base = along(seen.sent[number][partition]) if whole else 0.0
        return base + along(seen.uploads[number][partition])

    def step(seen: Observation, view: AdversaryView, number: int) -> float:
        if view in (AdversaryView.RELEASED_MODELS, AdversaryView.MODELS_AND_COHORTS):
            return along(seen.models[number + 1]) - along(seen.models[number])
        total = seen.sums[number] if seen.sums else None
        if view is AdversaryView.SUM_ONLY and total is not None:
            bare = seen.bare[number]
            readable = [bare[partition] for partition in partitions or bare if partition in bare]
            return sum(map(along, readable)) if readable else along(total)
        uploads = seen.uploads[number]
        if view is AdversaryView.EACH_UPLOAD and partitions is not None:
            uploads = {
                partition: uploads[partition] for partition in partitions if partition in uploads
            }
        return sum(upload(seen, number, partition) for partition in uploads)

    def score(seen: Observation, view: AdversaryView) -> float:
        rounds = range(len(seen.models) - 1)
        return sum(
            signs[min(number, len(signs) - 1)] * step(seen, view, number) for number in rounds
        )

    return score


@dataclass(frozen=True, kw_only=True)
class World:
    """One of the two situations that an audit compares, with all that a run in it needs.

    In one situation the canary's data are present, in the other they are absent.

    Parameters
    ----------
    strategy : Callable[[], Strategy]
        Makes a new strategy for each trial. To save time, it should evaluate on no client.
    """

    strategy: Callable[[], Strategy]
    client_app: ClientApp
    num_clients: int
    run_config: Mapping[str, bool | float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The two worlds that an audit compares, and the score by which an adversary tells them apart.

    The audit is tight if all other units contribute nothing, and the canary's contribution to an
    upload has a known direction and a norm far above the clipping norm.

    Parameters
    ----------
    without, present : World
        Without the canary, and with it. They must be neighbours in the sense of the reported ε.
    initial : ArrayRecord
        The first model.
    score : Score
        Score of one run for a view; higher if the canary seems to be present.
    views : Sequence[AdversaryView]
        Views to audit; views without a finite ε are skipped.
    reported : Mapping[AdversaryView, float], optional
        ε by view, in place of the strategy's ``guarantees()``.
    delta : float, optional
        δ of the ε in ``reported``.
    gaussian : bool, optional
        True if the mechanism is Gaussian, so that the bound `if_gaussian` is valid. By default,
        True if the guarantee's accountant is the exact one for Gaussian mechanisms.
    on_round : Callable[[int], None], optional
        Called with the number of each training round before it begins, for a canary that changes
        by round.
    """

    name: str
    without: World
    present: World
    initial: ArrayRecord
    score: Score
    rounds: int = 1
    views: Sequence[AdversaryView] = tuple(AdversaryView)
    reported: Mapping[AdversaryView, float] | None = None
    delta: float | None = None
    gaussian: bool | None = None
    on_round: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        require_at_least_one("rounds", self.rounds)
        if not self.views:
            raise InvalidValue("views=(): expected at least one AdversaryView")
        if self.reported is not None and self.delta is None:
            raise InvalidValue("delta=None: expected the δ of the ε in reported")
