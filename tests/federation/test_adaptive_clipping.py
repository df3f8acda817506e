"""Runs whose clipping norm adapts, in every placement of the noise."""

import math

import numpy as np
import pytest

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
    SecureSum,
)
from flower_ext.training import Task
from tests.support.plans import quiet_clipping, release_plan
from tests.support.pulls import ONE_STEP, client_data, initial, model, plain_app, pull
from tests.support.travelling import Recorder

FEW, MANY = 8, 20
SUMS = SecureSum(colluding=0.0, dropouts=0.3)
PLACEMENTS = ("client", "server", SUMS)
FORCES = np.exp(0.5 * np.random.default_rng(1).standard_normal(MANY)).tolist()
"""Pulls of clients, whose updates are √2 as long in every round: in the weight and in the bias."""
MEDIAN = math.sqrt(2) * float(np.median(FORCES))


def task(data) -> Task:
    return Task(
        model=model,
        data=lambda partition: data(partition) if callable(data) else client_data(data[partition]),
        loss=pull,
        metrics={},
        device="cpu",
    )


def play_rounds(data, clipping, rounds, *, clients=None, app=None, grid=InProcessGrid, **changes):
    """Return the norms of the rounds and of the next one, the strategy, and the grid."""
    clients = clients or len(data)
    options = {"seed": 5, "seeded_noise": changes.pop("seeded_noise", True)}
    fields = {"clipping_norm": clipping, "noise_multiplier": 1e-3, "delta": 1e-3, **changes}
    plan = release_plan(clients, rounds=rounds, **fields)
    strategy = FederatedStrategy(DPFedAvg(local=ONE_STEP), plan, evaluate_every=0, **options)
    work = task(data)
    app = app(work) if app else DPFedAvg.client_app(work, allow_seeded_noise=True)
    norms, engine = [], grid(app, clients)
    strategy.start(
        engine,
        initial(),
        num_rounds=rounds,
        evaluate_fn=lambda number, _: (
            norms.append(strategy.run.progress.row["adaptive_norm"]) if number else None
        ),
    )
    assert strategy.refusals == []
    return [*norms, strategy.run.mechanism.adaptive_norm], strategy, engine


@pytest.mark.parametrize(  # each pair of values once
    ("placement", "begin", "quantile"),
    [
        pytest.param("client", 0.01, 0.5, marks=pytest.mark.full),
        pytest.param("client", 100 * MEDIAN, 0.8, marks=pytest.mark.full),
        ("server", 0.01, 0.8),
        ("server", 100 * MEDIAN, 0.5),
    ],
)
def test_the_norm_finds_the_quantile_from_far_below_and_far_above(placement, begin, quantile):
    """In 30 rounds: at the rate 0.2 of the paper, the norm falls by at most e³ in 30 rounds."""
    rate = {0.5: 0.5, 0.8: 1.2}[quantile]
    clipping = quiet_clipping(initial_norm=begin, quantile=quantile, learning_rate=rate)
    norms, _, _ = play_rounds(FORCES, clipping, 30, noise_placement=placement)
    lengths = math.sqrt(2) * np.asarray(FORCES)
    assert norms[0] == begin
    assert norms[-1] == pytest.approx(np.quantile(lengths, quantile), rel=0.2)
    within = np.mean([np.mean(lengths <= norm) for norm in norms[-5:]])
    assert within == pytest.approx(quantile, abs=0.1)


def steps(forces, rounds, *, quantile=0.5, silent=()):
    """Return the norms by plain arithmetic without noise; ``silent`` clients have the side 0."""
    norms = [1.0]
    for _ in range(rounds):
        sides = [
            0.0 if client in silent else math.copysign(0.5, norms[-1] - math.sqrt(2) * force)
            for client, force in enumerate(forces)
        ]
        fraction = 0.5 + sum(sides) / len(forces)
        norms.append(norms[-1] * math.exp(-0.5 * (fraction - quantile)))
    return norms


def test_in_every_placement_the_norm_takes_the_same_steps():
    forces = FORCES[:FEW]
    for placement in PLACEMENTS:
        norms, _, _ = play_rounds(forces, quiet_clipping(), 3, noise_placement=placement)
        assert norms == pytest.approx(steps(forces, 3), rel=0.02)
    norms, _, _ = play_rounds(forces, quiet_clipping(), 3, app=plain_app, seeded_noise=False)
    assert norms == pytest.approx(steps(forces, 3), rel=0.05)  # nine standard deviations


def failing(kind):
    """Return the clients' data; the first client fails."""

    def data(partition):
        if partition:
            return client_data(FORCES[partition])
        if kind == "raises":
            raise OSError("no such file")
        if kind == "no examples":
            return client_data()
        return client_data({"NaN": math.nan, "zero": 0.0}[kind])

    return data


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_client_that_fails_counts_as_one_whose_data_are_zeroed_out(placement):
    """Its side is 0, so neither its upload nor the norm shows why there is no update."""
    kinds = ("raises", "no examples", "NaN", "zero")
    options = {"clients": FEW, "noise_placement": placement}
    runs = [play_rounds(failing(kind), quiet_clipping(), 2, **options)[0] for kind in kinds]
    assert runs[0] == pytest.approx(steps(FORCES[:FEW], 2, silent={0}), rel=0.02)
    assert all(norms == runs[0] for norms in runs)


@pytest.mark.parametrize("placement", ["client", "server"])
def test_an_empty_cohort_counts_half_as_within_the_norm(placement):
    sampling = PoissonSampling(4, 1e-9)
    plan = {"sampling": sampling, "noise_multiplier": 1e-12, "noise_placement": placement}
    clipping = quiet_clipping(quantile=0.9, count_noise_stddev=1e-11)
    norms, _, _ = play_rounds(FORCES[:4], clipping, 2, **plan)
    assert norms == pytest.approx([math.exp(0.2 * n) for n in range(3)], rel=0.02)


class Losing(Recorder):
    """A grid that loses the uploads of five clients in the second round."""

    def send_and_receive(self, messages, *, timeout=None):
        for reply in super().send_and_receive(messages, timeout=timeout):
            facts = reply.metadata
            second = facts.message_type.startswith("train") and facts.group_id == "2"
            if not (second and facts.src_node_id - 1_000 < 5):
                yield reply


def test_a_discarded_round_leaves_the_norm_as_it_is():
    norms, _, _ = play_rounds(FORCES[:FEW], quiet_clipping(), 3, grid=Losing, noise_placement=SUMS)
    assert norms[1] == norms[2]
    assert norms[0] != norms[1]
    assert norms[2] != norms[3]


def test_missing_clients_count_half_and_the_server_adds_their_noise():
    forces = FORCES[:FEW]
    norms, _, _ = play_rounds(forces, quiet_clipping(), 3, grid=Losing)
    before, after = norms[1], norms[2]
    sides = [math.copysign(0.5, before - math.sqrt(2) * force) for force in forces[5:]]
    assert after == pytest.approx(before * math.exp(-0.5 * sum(sides) / FEW), rel=0.02)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_clients_learn_the_norm_of_the_round_only_where_they_clip(placement):
    _, _, grid = play_rounds(
        FORCES[:FEW], quiet_clipping(), 1, grid=Recorder, noise_placement=placement
    )
    requests = [
        m.content[records.ROUND] for m in grid.sent if m.metadata.message_type.startswith("train")
    ]
    assert [entries.get("adaptive-norm") for entries in requests] == (
        [None if placement == "server" else 1.0] * FEW
    )


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_epsilon_is_that_of_the_same_run_with_a_fixed_norm(placement):
    options = {"noise_placement": placement, "noise_multiplier": 2.0}
    claims = [
        {
            claim.view: claim.epsilon
            for claim in play_rounds(FORCES[:FEW], c, 2, **options)[1].guarantees()
        }
        for c in (AdaptiveClipping(), AdaptiveClipping(count_noise_stddev=1.001))
    ]
    fixed = ReleasePlan(
        sampling=FullParticipation(FEW), clipping_norm=1.0, rounds=2, delta=1e-3, **options
    )
    strategy = FederatedStrategy(DPFedAvg(local=ONE_STEP), fixed, evaluate_every=0, seed=5)
    strategy.start(
        InProcessGrid(DPFedAvg.client_app(task(FORCES[:FEW])), FEW),
        initial(),
        num_rounds=2,
    )
    published = [c for c in strategy.guarantees() if c.basis == "provable"]
    expected = {claim.view: claim.epsilon for claim in published}
    assert claims == [expected, expected]
    assert math.isfinite(expected[AdversaryView.RELEASED_MODELS])
