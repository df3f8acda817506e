"""Mechanisms whose unit is a client, with one update."""

from dataclasses import replace
from functools import partial

import torch

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.privacy import (
    AdversaryView,
    CorrelatedNoise,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
    SecureScores,
    SpacedSampling,
)
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix, Vector
from flower_ext.privacy.plans.release_mechanism import SpacedRelease
from flower_ext_audit.experiment import Observation, Score, projected
from flower_ext_audit.linear import (
    BEYOND,
    HUGE,
    LARGE,
    ONE_STEP,
    SIZE,
    LinearMechanism,
    axes,
    client_data,
    plain_app,
    pulls,
)
from flower_ext_audit.mechanisms.plans import (
    DELTA,
    HONEST_SUM,
    MODELS,
    adaptive_plans,
    release_plans,
    sided_score,
    strategy_of,
)

_dp_fedavg = partial(strategy_of, DPFedAvg(local=ONE_STEP))


_CLIENT_NOISE = LinearMechanism(
    name="client-noise",
    plan=release_plans(FullParticipation(2)),
    strategy=_dp_fedavg,
    without=[client_data(0.0), client_data(0.0)],
    present=[client_data(HUGE), client_data(0.0)],
    partitions=[0],
)
_POISSON_CLIENT_NOISE = replace(
    _CLIENT_NOISE,
    name="client-noise-poisson",
    # Sampling amplifies ε against an adversary that sees released models.
    plan=release_plans(PoissonSampling(2, 0.5), noise_multiplier=3.0),
    # The server refuses uploads that are improbably large for their noise.
    present=[client_data(LARGE), client_data(0.0)],
    views=MODELS,
)
_ADAPTIVE = replace(
    _CLIENT_NOISE,
    name="adaptive-clipping",
    plan=adaptive_plans(FullParticipation(2)),
    score=sided_score(partitions=[0]),
)


_TURNS = SpacedSampling(population=2, size=1, rounds_apart=2, participations=3)
_IN_TURNS = release_plans(_TURNS, correlation=CorrelatedNoise(), noise_placement="server")


def _in_turns_matrix(rounds: int) -> StrategyMatrix:
    mechanism = _IN_TURNS(1.0, rounds).mechanism()
    assert isinstance(mechanism, SpacedRelease)
    return mechanism.strategy


def of_correlated(moves: Vector) -> Score:
    """Return the score that best detects the canary under correlated noise.

    Let C be the `StrategyMatrix` of the noise. The product of C and the releases has independent
    noise, and the canary moves the product's rows by ``moves``. The score projects the product on
    ``moves``.
    """
    column = _in_turns_matrix(len(moves)).coefficients(len(moves))
    weights = [float(column[: len(moves) - n] @ moves[n:]) for n in range(len(moves))]
    return projected(axes(SIZE), signs=weights)


_IN_TURN_ROUNDS = 5
_CORRELATED = replace(
    _CLIENT_NOISE,
    name="correlated-noise",
    plan=_IN_TURNS,
    # The canary takes part in rounds 1, 3 and 5, and pulls in the same direction.
    score=of_correlated(
        _in_turns_matrix(_IN_TURN_ROUNDS).row_moves(
            _IN_TURN_ROUNDS, rounds_apart=2, participations=3
        )
    ),
    views=(AdversaryView.RELEASED_MODELS, AdversaryView.MODELS_AND_COHORTS),
    rounds=_IN_TURN_ROUNDS,
)


def _scored(*accuracies: float) -> ClientData:
    """Return data of a client with a zero update, and with the mean of ``accuracies`` as metric."""
    test = Examples(torch.zeros(len(accuracies), SIZE), torch.tensor(accuracies))
    return ClientData(train=pulls(0.0), test=test)


def _of_scores(name: str) -> Score:
    """Return a score for audits of evaluations in which the canary reports by far the best metric.

    All other clients report ½, the middle of the bounds 0 and 1. From the released count and mean,
    the score rebuilds two noised sums: the number of clients, and the sum of (metric − ½).
    The canary adds at most 1 to the first sum and ½ to the second. The score projects the pair of
    sums on (1, ½).
    """

    def score(seen: Observation, view: AdversaryView) -> float:
        total = 0.0
        for means in seen.scores:
            count, mean = means.get("scored_clients", 0.0), means.get(f"{name}_mean", 0.5)
            total += count + 0.5 * count * (mean - 0.5)
        return total

    return score


_SECURE_SUM = LinearMechanism(
    name="secure-sum",
    # The server sees all messages of the protocol, and computes the sum from them.
    plan=release_plans(FullParticipation(3), noise_placement=HONEST_SUM),
    strategy=_dp_fedavg,
    without=[client_data(0.0), client_data(0.0), client_data(0.0)],
    present=[client_data(HUGE), client_data(0.0), client_data(0.0)],
    views=(AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY),
    partitions=[0],
)

OF_CLIENTS = (
    _CLIENT_NOISE,
    replace(
        _CLIENT_NOISE,
        name="server-noise",
        plan=release_plans(FullParticipation(2), noise_placement="server"),
    ),
    replace(_CLIENT_NOISE, name="client-noise-mod", app=plain_app),
    _CORRELATED,
    _ADAPTIVE,
    replace(
        _ADAPTIVE,
        name="adaptive-clipping-server",
        plan=adaptive_plans(FullParticipation(2), noise_placement="server"),
    ),
    replace(
        _SECURE_SUM,
        name="adaptive-clipping-secure-sum",
        plan=adaptive_plans(FullParticipation(3), noise_placement=HONEST_SUM),
        score=sided_score(partitions=[0]),
    ),
    _POISSON_CLIENT_NOISE,
    replace(
        _POISSON_CLIENT_NOISE,
        name="server-noise-poisson",
        plan=release_plans(PoissonSampling(2, 0.5), noise_multiplier=3.0, noise_placement="server"),
    ),
    _SECURE_SUM,
    replace(_SECURE_SUM, name="secure-sum-mod", app=plain_app),
    LinearMechanism(
        name="secure-scores",
        # Training has so much noise that the evaluations determine ε.
        plan=lambda noise, rounds: ReleasePlan(
            sampling=FullParticipation(3),
            clipping_norm=1.0,
            noise_multiplier=50.0,
            rounds=rounds,
            delta=DELTA,
            noise_placement=HONEST_SUM,
            queries=(SecureScores(noise_multiplier=0.5 * noise, times=rounds),),
        ),
        strategy=partial(_dp_fedavg, evaluate_every=1),
        # Without the canary, the first client has no test examples.
        without=[_scored(), _scored(0.5), _scored(0.5)],
        present=[_scored(BEYOND), _scored(0.5), _scored(0.5)],
        views=MODELS,
        metrics={"accuracy": lambda outputs, targets: float(targets.mean())},
        score=_of_scores("accuracy"),
    ),
)
