"""No user, however many records they have, moves an upload by more than one clipped update."""

import re
from itertools import product

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_ext.algorithms.uldp import (
    averaging,
)
from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd
from flower_ext.algorithms.uldp.weights import check_weights, user_weights
from flower_ext.data import Examples, SiloData
from flower_ext.federation import InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    FullParticipation,
    PoissonSampling,
)
from flower_ext.training import LocalTraining
from tests.support.grids import grid
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    plan,
    silo,
    silos,
    task,
)
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder
from tests.support.uldp_runs import run, sum_of, without


def hostile(seed, count):
    """Return silos of 1 to 40 records with features up to 100, so that most updates are clipped."""
    rng = np.random.default_rng(seed)
    data = []
    for number in range(count):
        base = silo(int(rng.integers(1_000)), records_=int(rng.integers(1, 40)), users=USERS)
        scale = 10.0 ** rng.uniform(-1, 2)
        train = Examples(base.train.features * scale, base.train.targets)
        if number and rng.random() < 0.5:  # one user in all silos, with the same records everywhere
            train = Examples(train.features, torch.zeros_like(train.targets))
        owners = torch.where(torch.rand(len(train)) < 0.3, 3, base.owners)
        data.append(SiloData(train=train, test=base.test, owners=owners))
    return data


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 4), bound=st.sampled_from([0.01, 1.0]))
@pytest.mark.parametrize(
    ("method", "weighting", "sampling"),
    grid(
        product(
            [UldpAvg, UldpSgd],
            ["equal", "by-records"],
            [FullParticipation(USERS), PoissonSampling(USERS, 0.5)],
        ),
        lambda case: case[2] == FullParticipation(USERS) or case[:2] == (UldpAvg, "by-records"),
    ),
)
def test_one_user_with_all_records_moves_the_sum_within_the_clipping_norm(
    method, weighting, sampling, seed, count, bound
):
    torch.manual_seed(seed)
    data = hostile(seed, count)
    one, other = (
        sum_of(method, each, sampling, weighting, bound) for each in (data, without(3, data))
    )
    assert np.linalg.norm(one - other) <= bound * (1 + 1e-5)


def test_the_bound_is_reached_so_that_less_noise_would_not_do():
    """One user whose clipped updates agree in all silos moves the sum by exactly C."""
    first = silo(1, records_=4, users=USERS)
    alike = SiloData(
        train=Examples(first.train.features * 50, torch.zeros_like(first.train.targets)),
        test=first.test,
        owners=torch.full((4,), 3),
    )
    data = [alike] * 4
    for weighting in ("equal", "by-records"):
        moved = sum_of(UldpSgd, data, FullParticipation(USERS), weighting, 0.01)
        assert np.linalg.norm(moved) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.full((SILOS, 2), 0.34), "weights of user 7 sum to 1.02 over the silos"),
        (np.array([[0.5, 0.4], [0.5, 0.7], [0.0, 0.1]]), "weights of user 9 sum to 1.2"),
        (np.array([[1.5, 0.0], [-0.5, 0.0], [0.0, 0.0]]), r"numbers in \[0, 1\]"),
        (np.array([[np.nan, 0.0], [0.0, 0.0], [0.0, 0.0]]), r"numbers in \[0, 1\]"),
        (np.full((2, 2), 0.5), r"shape \(2, 2\): expected \(3, 2\)"),
        (np.full((SILOS, 1), 0.5), "weights of every user sum to 1.5"),
    ],
)
def test_weights_by_which_one_user_could_do_more_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        check_weights(weights, SILOS, [7, 9])


def test_weights_declared_equal_are_at_most_one_over_the_silos():
    check_weights(np.full((SILOS, 1), 1 / SILOS), SILOS, [7, 9], "equal")
    check_weights(np.empty((SILOS, 0)), SILOS, [], "equal")
    one_silo = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    check_weights(one_silo, SILOS, [7, 9], "by-records")
    with pytest.raises(ValueError, match="weights up to 1 with .*: expected at most 1/3"):
        check_weights(one_silo, SILOS, [7, 9], "equal")


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 100), seed=st.integers(0, 2**20))
def test_weights_by_records_sum_to_one_or_to_nothing_whatever_the_histogram(count, seed):
    rng = np.random.default_rng(seed)
    most = rng.integers(0, 10 ** rng.integers(1, 9))
    histogram = rng.integers(0, most + 1, (count, 20))
    histogram[:, 3] = 0
    weights = user_weights("by-records", histogram)
    check_weights(weights, count, range(20))
    np.testing.assert_allclose(weights.sum(axis=0), histogram.sum(axis=0) > 0)


@pytest.mark.parametrize(
    ("weighting", "message"),
    [("by-records", r"numbers in \[0, 1\]|sum to 2"), ("equal", "expected at most 1/3")],
)
def test_weights_that_are_too_large_end_the_run_before_anything_is_sent(
    weighting, message, monkeypatch
):
    doubled = lambda *source: 2 * user_weights(*source)  # noqa: E731
    monkeypatch.setattr(averaging, "user_weights", doubled)
    strategy = strategy_of(UldpAvg, plan=plan(), weighting=weighting, local=LOCAL, **COMMON)
    with pytest.raises(ValueError, match=message):
        run(strategy)
    assert strategy.participations.rounds == 0


class Forger(InProcessGrid):
    """A grid that changes messages to silo 1."""

    def __init__(self, *args, forge, **options):
        super().__init__(*args, **options)
        self.forge = forge

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        for message in messages:
            training = message.metadata.message_type.startswith("train")
            if training and message.metadata.dst_node_id == 1_001:
                self.forge(message.content)
        return super().send_and_receive(messages, timeout=timeout)


def forged(forge, **changes):
    """Run a strategy whose messages to silos are forged, and return the strategy."""
    strategy = strategy_of(
        UldpAvg, plan=plan(**changes), weighting="by-records", local=LOCAL, **COMMON
    )
    app = UldpAvg.client_app(task(), allow_seeded_noise=True)
    grid = Forger(app, num_clients=SILOS, forge=forge)
    strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    return strategy


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.full(USERS, 1.5), r"numbers in \[0, 1\]"),
        (np.full(USERS, np.inf), "'weights' holds NaN or infinite values"),
        (np.full(USERS + 1, 0.5), "weights of shape"),
    ],
)
def test_a_silo_refuses_weights_that_break_its_users_bound(weights, message):
    def forge(content):
        content["user-weights"]["weights"] = Array(weights)

    strategy = forged(forge)
    assert len(strategy.refusals) == ROUNDS
    assert all(re.search(message, refusal) for refusal in strategy.refusals)


def recorded(strategy, data=None):
    app = strategy.method.client_app(task(data), allow_seeded_noise=True)
    grid = Recorder(app, num_clients=SILOS)
    strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    return grid


@pytest.mark.parametrize("weighting", ["equal", "by-records"])
def test_every_silo_gets_the_same_users_which_are_the_plans_draw(weighting):
    sampling = PoissonSampling(USERS, 0.4)
    strategy = strategy_of(UldpAvg, plan=plan(sampling), weighting=weighting, local=LOCAL, **COMMON)
    grid = recorded(strategy)
    by_round = {}
    for message in grid.sent:
        if message.metadata.message_type == "train.uldp_avg":
            sent = records.to_arrays(message.content["user-weights"])
            by_round.setdefault(message.metadata.group_id, []).append(sent)
    assert set(by_round) == {"1", "2", "3"}
    drawn = []
    for sent in by_round.values():
        assert len(sent) == SILOS
        bits = {one["sampled"].tobytes() for one in sent}
        assert len(bits) == 1
        users = np.flatnonzero(np.unpackbits(sent[0]["sampled"], count=USERS)).tolist()
        drawn.append(users)
        sums = sum(np.broadcast_to(one["weights"], (len(users),)) for one in sent)
        assert (sums <= 1 + 1e-12).all()
    assert len(set(map(tuple, drawn))) > 1
    assert strategy.participations.uploads.total() == sum(map(len, drawn))
    assert bool(weighting == "by-records") == any(
        "histogram" in reply.content["answer"]
        for reply in grid.received
        if reply.metadata.message_type.startswith("query.uldp")
    )


def test_nothing_but_the_noised_sum_leaves_a_silo_in_training():
    grid = recorded(strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON))
    replies = [m for m in grid.received if m.metadata.message_type.startswith("train")]
    assert len(replies) == SILOS * ROUNDS
    assert all(set(reply.content.keys()) == {"update"} for reply in replies)


def test_an_empty_draw_of_users_is_a_round_of_noise():
    sampling = PoissonSampling(USERS, 1e-9)
    strategy = strategy_of(
        UldpAvg, plan=plan(sampling), weighting="by-records", local=LOCAL, **COMMON
    )
    moved = run(strategy)
    start = task().initial_params(SEED)
    assert any(not torch.equal(moved[n], start[n]) for n in start)
    assert strategy.participations.rounds == ROUNDS
    assert strategy.participations.in_sums == 0


def test_no_first_answer_shows_whether_a_silo_has_records():
    """With equal weights, the server asks for nothing that depends on the data."""

    def answers(data):
        training = LocalTraining(epochs=1, optimizer="AdamW")  # trains users one by one
        strategy = strategy_of(UldpAvg, plan=plan(), local=training, **COMMON, evaluate_every=0)
        grid = Recorder(strategy.method.client_app(task(data), allow_seeded_noise=True), SILOS)
        strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=1)
        asked = [m for m in grid.received if m.metadata.message_type == "query.uldp_avg"]
        assert len(asked) == SILOS
        sent = [repr(records.to_arrays(message.content[records.ANSWER])) for message in asked]
        return sent, [guarantee.statement() for guarantee in strategy.guarantees()]

    usual = silos()
    alone = usual[2].without({*range(USERS)} - {5})  # user 5 has the silo for itself
    assert len(alone.train)
    assert answers([*usual[:2], alone]) == answers([*usual[:2], alone.without([5])])
