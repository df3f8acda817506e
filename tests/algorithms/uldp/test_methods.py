"""Uldp-FL: each method equals its plain loop; one user moves a sum by at most the clipping norm."""

import math
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.algorithms import DPFedAvg
from flower_ext.algorithms.uldp import (
    UldpGroup,
    UldpNaive,
    averaging,
    silo_training,
)
from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd, theory_learning_rate
from flower_ext.algorithms.uldp.weights import check_weights, user_weights
from flower_ext.data import ClientData, Examples, SiloData, group_size
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid, Sgd, records
from flower_ext.federation.claims import spent_by
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.requests import ClientRequest
from flower_ext.federation.sums.weighted import WEIGHTS
from flower_ext.federation.sums.weighted_silo import HiddenSum
from flower_ext.privacy import (
    AdversaryView,
    FixedSizeSampling,
    FullParticipation,
    Ledger,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyUnit,
    gaussian_loss,
    privacy_loss_of,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, ProtectedByTraining
from flower_ext.privacy.run_summary import RunSummary, SumTerms
from flower_ext.privacy.theorems.uldp_theorem import uldp_avg_guarantees, uldp_closed_form
from flower_ext.training import DpSgdTraining, LocalTraining, Task
from tests.support.grids import grid
from tests.support.plans import mechanism_of
from tests.support.reference import uldp as reference
from tests.support.reference.comparing import close
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    histogram,
    plan,
    silo,
    silos,
    task,
)
from tests.support.strategies import group_strategy, strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import CLASSES, FEATURES

ALL, SOME = FullParticipation(USERS), PoissonSampling(USERS, 0.4)


def run(strategy, data=None, rounds=ROUNDS, **grid_options):
    app = strategy.method.client_app(task(data), allow_seeded_noise=True)
    count = len(data) if data is not None else SILOS
    grid = InProcessGrid(app, num_clients=count, **grid_options)
    result = strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=rounds)
    return records.to_params(result.arrays)


@pytest.mark.parametrize(
    ("method", "weighting", "sampling"),
    grid(
        product([UldpAvg, UldpSgd], ["equal", "by-records"], [ALL, SOME]),
        {(UldpAvg, "by-records", SOME), (UldpSgd, "equal", ALL)}.__contains__,
    ),
)
def test_averaging_equals_the_plain_loop(method, weighting, sampling):
    local = {"local": LOCAL} if method is UldpAvg else {}
    strategy = strategy_of(method, plan=plan(sampling), weighting=weighting, **local, **COMMON)
    ours = run(strategy)
    assert strategy.refusals == []
    theirs = reference.averaging(
        silos(),
        task().initial_params(SEED),
        plan(sampling),
        seed=SEED,
        rounds=ROUNDS,
        weighting=weighting,
        local=local.get("local"),
        server_rate=5.0,
    )
    close(ours, theirs)
    assert not torch.allclose(ours["head.weight"], task().initial_params(SEED)["head.weight"])


def test_naive_equals_the_plain_loop_also_with_an_empty_silo():
    data = [*silos(2), silo(2, records_=0)]
    strategy = strategy_of(UldpNaive, plan=plan(), local=LOCAL, **COMMON)
    ours = run(strategy, data)
    assert strategy.refusals == []
    start = task().initial_params(SEED)
    rest = {"seed": SEED, "rounds": ROUNDS, "local": LOCAL, "server_rate": 5.0}
    close(ours, reference.naive(data, start, plan(), **rest))


DP_SGD = DpSgdTraining(
    steps=4,
    sampling_rate=0.4,
    batch_size=8.0,
    learning_rate=0.5,
    clipping_norm=0.7,
    noise_multiplier=0.5,
)


def grouped(size, **changes):
    facts = {"num_users": USERS, "local": DP_SGD, "delta": 1e-5, **COMMON, **changes}
    return group_strategy(group_size=size, **facts)


@pytest.mark.parametrize("size", grid([2, "median", "max"], lambda size: size != "max"))
def test_group_equals_the_plain_loop_on_records_that_never_change(size):
    strategy = grouped(size)
    ours = run(strategy)
    assert strategy.refusals == []
    held = histogram(silos(), USERS)
    drawn = strategy.run.state.server["limits"]
    limits, k = drawn["limits"], int(drawn["k"])
    assert k == group_size(held, size)
    np.testing.assert_array_equal(limits.sum(axis=0), np.minimum(held.sum(axis=0), k))
    start = task().initial_params(SEED)
    rest = {"seed": SEED, "rounds": ROUNDS, "server_rate": 5.0}
    theirs = reference.group(silos(), start, limits, DP_SGD, **rest)
    # Clipping leaves a margin of 1e-5, which the server's rate multiplies by five.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


def group_uploads(strategy, *, least=0.0, **asked_instead):
    """Return all silos' answers in the first round to a server that asks for other settings.

    The silos' owners require the noise multiplier ``least``.
    """
    grid = InProcessGrid(UldpGroup.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    for context in grid.contexts.values():
        context.node_config["least-noise-multiplier"] = least
    start = ArrayRecord(task().initial_params(SEED))
    strategy.run.progress.begin()
    questions = strategy.configure_train(1, start, ConfigRecord(), grid)
    for question in questions:
        question.content["settings"].update({f"dp-sgd.{n}": v for n, v in asked_instead.items()})
    return list(grid.send_and_receive(questions))


@pytest.mark.parametrize(
    ("least", "asked", "takes_part"),
    [
        (1.0, {}, True),
        (1.001, {}, False),
        (0.5, {"noise_multiplier": 0.6}, True),
        (0.5, {"noise_multiplier": 0.4}, False),
        (0.5, {"noise_multiplier": math.nan}, False),
        (0.5, {"noise_multiplier": "much"}, False),
        (math.nan, {}, False),
    ],
)
def test_a_silos_owner_sets_the_least_noise_of_its_dp_sgd(least, asked, takes_part):
    local = replace(DP_SGD, noise_multiplier=1.0)
    answers = group_uploads(grouped(2, local=local), least=least, **asked)
    assert [answer.has_error() for answer in answers] == [not takes_part] * SILOS


def test_a_claim_that_training_adds_noise_is_refused_by_methods_that_add_none():
    node = Context(1, 1, {"least-noise-multiplier": 0.1}, RecordDict(), {})
    claim = ClientRequest(
        protection=ProtectedByTraining(), settings={"dp-sgd.noise_multiplier": 5.0}
    )
    with pytest.raises(PermissionError, match="noise multiplier of 0 on this client"):
        NodePolicy(node, allow_seeded_noise=False).admit(claim, DPFedAvg.client)


def test_which_records_a_step_takes_is_a_secret_unless_noise_is_seeded():
    """Amplification needs the secret, so the run's seed, which the server has, must not tell."""
    quiet = replace(DP_SGD, noise_multiplier=1e-9)

    def sent(seeded):
        answers = group_uploads(grouped("max", local=quiet, seeded_noise=seeded))
        updates = [records.to_arrays(answer.content["update"]) for answer in answers]
        return np.concatenate([a.ravel() for update in updates for a in update.values()])

    np.testing.assert_array_equal(sent(True), sent(True))
    assert np.abs(sent(False) - sent(False)).max() > 1e-3
    assert np.abs(sent(False) - sent(True)).max() > 1e-3


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_silo_refuses_steps_without_noise_whatever_the_server_asks_for(value):
    for answer in group_uploads(grouped(2), noise_multiplier=value):
        assert "noise_multiplier=" in answer.error.reason


def test_group_promises_what_its_steps_cost():
    strategy = grouped(3)
    run(strategy)
    published, provable = strategy.guarantees()
    assert (published.basis, provable.basis) == ("published", "provable")
    assert all(g.unit is PrivacyUnit.USER for g in (published, provable))
    assert any("records each user has" in text for text in provable.not_covered)
    spent = spent_by(strategy.run)
    assert spent["epsilon_provable"] == provable.epsilon > 0
    assert spent["epsilon_published"] == published.epsilon > 0
    longer = grouped(3)
    run(longer, rounds=ROUNDS + 1)
    assert longer.guarantees()[1].epsilon > provable.epsilon


def test_the_default_without_privacy_is_fedavg_between_the_silos():
    strategy = FederatedStrategy(
        DPFedAvg(local=LOCAL, server=Sgd(learning_rate=1.5)),
        NonPrivatePlan(sampling=FullParticipation(SILOS)),
        seed=SEED,
    )
    ours = run(strategy)
    world = task().initial_params(SEED)
    for t in range(1, ROUNDS + 1):
        deltas = [
            reference.trained(
                world, one.train, LOCAL.in_round(t), reference.batch_order(SEED, s, t)
            )
            for s, one in enumerate(silos())
        ]
        world = {n: p + 1.5 * sum(d[n] for d in deltas) / SILOS for n, p in world.items()}
    close(ours, world)


# Sensitivity ---------------------------------------------------------------------------------


def sum_of(method, data, sampling, weighting, bound):
    """Return Σ_s Δ_s of one round before any division, with the same small noise for all data."""
    seen = {}

    @dataclass(frozen=True, kw_only=True)
    class Watched(method):
        def step(self, model, released, state):
            size = strategy.run.plan.sampling.expected_cohort_size
            seen.update({n: a.astype(np.float64) * size for n, a in released.mean.items()})
            return model, state

    strategy = strategy_of(
        Watched,
        plan=plan(sampling, clipping_norm=bound, noise_multiplier=1e-6),
        weighting=weighting,
        **{"local": replace(LOCAL, learning_rate=3.0)} if method is UldpAvg else {},
        **{**COMMON, "num_silos": len(data), "server": Sgd()},
        evaluate_every=0,
    )
    grid = InProcessGrid(
        method.client_app(task(data), allow_seeded_noise=True), num_clients=len(data)
    )
    start = ArrayRecord(task().initial_params(SEED))
    strategy.run.progress.begin()
    asked = strategy.configure_train(1, start, ConfigRecord(), grid)
    strategy.aggregate_train(1, grid.send_and_receive(asked))
    assert strategy.refusals == []
    return np.concatenate([a.ravel() for a in seen.values()])


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


def without(user, data):
    return [
        SiloData(
            train=one.train.subset(np.flatnonzero(one.owners != user)),
            test=one.test,
            owners=one.owners[one.owners != user],
        )
        for one in data
    ]


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
    ("weights", "said"),
    [
        (np.full((SILOS, 2), 0.34), "weights of user 7 sum to 1.02 over the silos"),
        (np.array([[0.5, 0.4], [0.5, 0.7], [0.0, 0.1]]), "weights of user 9 sum to 1.2"),
        (np.array([[1.5, 0.0], [-0.5, 0.0], [0.0, 0.0]]), r"numbers in \[0, 1\]"),
        (np.array([[np.nan, 0.0], [0.0, 0.0], [0.0, 0.0]]), r"numbers in \[0, 1\]"),
        (np.full((2, 2), 0.5), r"shape \(2, 2\): expected \(3, 2\)"),
        (np.full((SILOS, 1), 0.5), "weights of every user sum to 1.5"),
    ],
)
def test_weights_by_which_one_user_could_do_more_are_refused(weights, said):
    with pytest.raises(ValueError, match=said):
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
    held = np.random.default_rng(seed).integers(0, 10 ** np.random.default_rng(seed).integers(1, 9))
    held = np.random.default_rng(seed).integers(0, held + 1, (count, 20))
    held[:, 3] = 0
    weights = user_weights("by-records", held)
    check_weights(weights, count, range(20))
    np.testing.assert_allclose(weights.sum(axis=0), held.sum(axis=0) > 0)


@pytest.mark.parametrize(
    ("weighting", "said"),
    [("by-records", r"numbers in \[0, 1\]|sum to 2"), ("equal", "expected at most 1/3")],
)
def test_weights_that_are_too_large_end_the_run_before_anything_is_sent(
    weighting, said, monkeypatch
):
    doubled = lambda *source: 2 * user_weights(*source)  # noqa: E731
    monkeypatch.setattr(averaging, "user_weights", doubled)
    strategy = strategy_of(UldpAvg, plan=plan(), weighting=weighting, local=LOCAL, **COMMON)
    with pytest.raises(ValueError, match=said):
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
    strategy = strategy_of(
        UldpAvg, plan=plan(**changes), weighting="by-records", local=LOCAL, **COMMON
    )
    app = UldpAvg.client_app(task(), allow_seeded_noise=True)
    grid = Forger(app, num_clients=SILOS, forge=forge)
    strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    return strategy


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (np.full(USERS, 1.5), r"numbers in \[0, 1\]"),
        (np.full(USERS, np.inf), r"numbers in \[0, 1\]"),
        (np.full(USERS + 1, 0.5), "weights of shape"),
    ],
)
def test_a_silo_refuses_weights_that_break_its_users_bound(weights, said):
    def forge(content):
        content["users"]["weights"] = Array(weights)

    strategy = forged(forge)
    assert len(strategy.refusals) == ROUNDS
    assert all("weights" in refusal for refusal in strategy.refusals)


# Users ---------------------------------------------------------------------------------------


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
            told = records.to_arrays(message.content["users"])
            by_round.setdefault(message.metadata.group_id, []).append(told)
    assert set(by_round) == {"1", "2", "3"}
    drawn = []
    for told in by_round.values():
        assert len(told) == SILOS
        bits = {one["sampled"].tobytes() for one in told}
        assert len(bits) == 1
        users = np.flatnonzero(np.unpackbits(told[0]["sampled"], count=USERS)).tolist()
        drawn.append(users)
        sums = sum(np.broadcast_to(one["weights"], (len(users),)) for one in told)
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


# Noise and dropouts --------------------------------------------------------------------------


class Absent(InProcessGrid):
    """A grid in which silo 2 does not answer in rounds 1 and 3."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        return [
            reply
            for reply in replies
            if not (
                reply.metadata.message_type.startswith("train")
                and reply.metadata.group_id in ("1", "3")
                and reply.metadata.src_node_id == 1_002
            )
        ]


def with_absence(tmp_path, method=UldpAvg):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = strategy_of(method, plan=plan(), local=LOCAL, ledger=ledger, **COMMON)
    grid = Absent(method.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    return strategy, Ledger.read(tmp_path / "ledger.jsonl"), ledger


def test_naive_leaves_the_given_plan_unchanged_and_accounts_by_its_silos():
    given = plan(noise_multiplier=5.0)
    strategy = strategy_of(UldpNaive, plan=given, local=LOCAL, **COMMON)
    assert strategy.run.plan is given
    assert strategy.run.mechanism.noise_multiplier == 5.0 * SILOS
    assert strategy.run.mechanism.sensitivity == 2.0 * SILOS
    assert strategy.run.mechanism.sampling.population == SILOS


@pytest.mark.parametrize(("method", "scale"), [(UldpAvg, 1.0), (UldpNaive, SILOS)])
def test_a_lost_silos_noise_is_topped_up_and_the_ledger_says_so(method, scale, tmp_path):
    strategy, entries, _ = with_absence(tmp_path, method)
    commits = [e["notes"] for e in entries if e["kind"] == "commit"]
    assert [e["answered"] for e in commits] == [2, 3, 2]
    missing = strategy.run.mechanism.noise_stddev * math.sqrt(1 / 3)
    assert missing == pytest.approx(0.4 * 0.3 * scale * math.sqrt(1 / 3))
    assert [e["topped_up_stddev"] for e in commits] == pytest.approx([missing, 0, missing])


def test_an_adversary_that_sees_sums_of_fewer_silos_sees_less_noise(tmp_path):
    strategy, _, _ = with_absence(tmp_path)
    assert strategy.participations.in_sums == pytest.approx(1.5 + 1 + 1.5)
    views = {g.view: g.epsilon for g in strategy.guarantees() if g.basis == "provable"}
    expected = gaussian_loss(0.4, releases=4.0, delta=1e-5).epsilon
    assert views[AdversaryView.SUM_ONLY] == pytest.approx(expected)
    models = gaussian_loss(0.4, releases=3, delta=1e-5).epsilon
    assert views[AdversaryView.RELEASED_MODELS] == pytest.approx(models)


def test_rounds_whose_uploads_all_came_too_late_still_count():
    class Silent(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            return [r for r in replies if not r.metadata.message_type.startswith("train")]

    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    grid = Silent(UldpAvg.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    views = {g.view: g.epsilon for g in strategy.guarantees() if g.basis == "provable"}
    expected = gaussian_loss(0.4, releases=ROUNDS, delta=1e-5).epsilon
    assert views[AdversaryView.EACH_UPLOAD] == pytest.approx(expected)


def test_guarantees_match_the_plan_and_the_log_has_both_epsilons():
    sampling = PoissonSampling(USERS, 0.4)
    strategy = strategy_of(
        UldpAvg, plan=plan(sampling), weighting="by-records", local=LOCAL, **COMMON
    )
    run(strategy)
    facts = RunSummary(
        method=strategy.method.traits,
        participations=strategy.participations,
        secure_noise=False,
        secure_cohorts=False,
    )
    sums = mechanism_of(plan(sampling), silos=SILOS)
    expected = uldp_avg_guarantees(sums, facts, SumTerms())
    ours = strategy.guarantees()
    assert [g.epsilon for g in ours] == [g.epsilon for g in expected]
    assert all(g.unit is PrivacyUnit.USER for g in ours[1:])
    spent = spent_by(strategy.run)
    assert spent["epsilon_published"] == ours[0].epsilon
    assert spent["epsilon_provable"] == ours[1].epsilon
    assert any("how many records each user has" in text for text in ours[1].not_covered)
    equal = strategy_of(UldpAvg, plan=plan(sampling), local=LOCAL, **COMMON)
    run(equal)
    assert not any("how many records" in text for text in equal.guarantees()[1].not_covered)


def test_naive_spends_on_the_ledger_what_is_provable_not_what_is_published(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = strategy_of(
        UldpNaive, plan=plan(noise_multiplier=5.0), local=LOCAL, ledger=ledger, **COMMON
    )
    run(strategy)
    published, provable = strategy.guarantees()
    assert published.epsilon == uldp_closed_form(noise_multiplier=5.0, rounds=3, delta=1e-5)
    assert provable.epsilon == pytest.approx(ledger.spent(1e-5).epsilon)
    assert provable.epsilon == pytest.approx(gaussian_loss(2.5, releases=3, delta=1e-5).epsilon)
    assert privacy_loss_of(
        {strategy.run.mechanism.release: 3}, delta=1e-5
    ).epsilon == pytest.approx(provable.epsilon)


# Memory --------------------------------------------------------------------------------------


def test_users_in_small_batches_are_the_same_users_in_large_ones(monkeypatch):
    def final(limit, prepared):
        monkeypatch.setattr(silo_training, "_PREPARED", prepared)
        strategy = strategy_of(UldpAvg, plan=plan(), weighting="by-records", local=LOCAL, **COMMON)
        return run(strategy, memory_limit=limit)

    one = final(2**30, 2048)
    for limit, prepared in ((1, 2048), (2**30, 3), (2**14, 7)):
        close(final(limit, prepared), one)


class Scaled(nn.Module):
    """A model with a buffer that no training changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x):
        return self.layer(x)


def silo_job(task, sizes=(5, 5, 1, 9, 40), training=LOCAL):
    """Return one silo with a user of each size, whose clipped updates have weight 1/2."""
    draw = torch.Generator().manual_seed(0)
    users = {
        user: Examples(torch.randn(size, 4, generator=draw), torch.arange(size) % 3)
        for user, size in enumerate(sizes)
    }
    params = task.initial_params(1)
    return silo_training.SiloJob(
        params=params,
        examples=users[0],
        training=training,
        generator=draw,
        users=users,
        seeds=list(users),
        total=silo_training.WeightedTotal(
            params,
            ClipAndNoise(of_units=True, clipping_norm=0.1, noise_stddev=1.0),
            [0.5] * len(sizes),
        ),
    )


@pytest.mark.parametrize("limit", [1, 2**30])
def test_buffers_stay_as_they_are_in_batches_and_alone(limit):
    task = Task(model=Scaled, data=lambda silo: silo, device="cpu")
    job = silo_job(task)
    silo_training.add_users(task, [job], trained=lambda name: True, memory_limit=limit)
    total = job.total.value
    assert not total.value["scale"].any()
    assert total.value["layer.weight"].any()
    assert job.params["scale"] == 2.0


def test_a_silos_sum_stays_in_double_precision_until_it_is_noised():
    task = Task(model=Scaled, data=lambda silo: silo, device="cpu")
    job = silo_job(task)
    silo_training.add_users(task, [job], trained=lambda name: True, memory_limit=2**30)
    assert {value.dtype for value in job.total.value.value.values()} == {torch.float64}


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv1d(1, 5, 2)
        self.head = nn.Linear(15, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.features(x.unsqueeze(1))).flatten(1))


@pytest.mark.parametrize("model", [Scaled, Convolutional])
def test_no_user_moves_the_update_of_another_by_a_single_bit(model):
    """Unstable training would amplify the rounding of a batch that has one more user."""
    task = Task(model=model, data=lambda silo: silo, device="cpu")
    job = silo_job(
        task,
        sizes=[20, 20, 9, 9, 9, 12, 1],
        training=LocalTraining(epochs=8, batch_size=4, learning_rate=1.0, momentum=0.9),
    )

    def updates(users):
        own = replace(job, users={user: job.users[user] for user in users})
        found = silo_training.users_updates(
            task, [own], trained=lambda name: True, memory_limit=2**30
        )
        return {
            user: {name: part[row].clone() for name, part in rows.items()}
            for _, members, rows in found
            for row, user in enumerate(members)
        }

    everyone = updates(job.users)
    assert sorted(everyone) == list(job.users)
    for absent in job.users:
        for user, update in updates([u for u in job.users if u != absent]).items():
            assert all(torch.equal(part, everyone[user][name]) for name, part in update.items())


def updates_of(task, job):
    """Return each user's update before clipping."""
    found = silo_training.users_updates(task, [job], trained=lambda name: True, memory_limit=2**30)
    return {
        user: {name: part[row].clone() for name, part in rows.items()}
        for _, members, rows in found
        for row, user in enumerate(members)
    }


def picky(outputs, targets):
    """A loss that refuses a label."""
    if bool((targets == 7).any()):
        raise RuntimeError("no such label")
    return cross_entropy(outputs, targets)


def far(outputs, targets):
    """A loss that is infinite for a label."""
    scale = torch.where(targets == 7, math.inf, 1.0)
    return (cross_entropy(outputs, targets % 3, reduction="none") * scale).mean()


UNSTABLE = LocalTraining(epochs=8, batch_size=4, learning_rate=1.0, momentum=0.9)
RAISING = {
    "dense, a label out of range": (Scaled, cross_entropy, UNSTABLE, 7),
    "convolutional, a label out of range": (Convolutional, cross_entropy, UNSTABLE, 7),
    "a loss that refuses": (Scaled, picky, UNSTABLE, 7),
    "no minimiser": (Scaled, far, LocalTraining(tolerance=1e-6, proximal_weight=1.0), 7),
}


@pytest.mark.parametrize(
    "raising",
    [
        pytest.param((2,), id="one", marks=pytest.mark.full),
        pytest.param((0, 2, 6), id="some"),
        pytest.param(tuple(range(7)), id="all"),
    ],
)
@pytest.mark.parametrize("kind", RAISING)
def test_a_user_whose_training_raises_moves_no_other_users_update(kind, raising, caplog):
    model, loss, training, label = RAISING[kind]
    task = Task(model=model, data=lambda silo: silo, loss=loss, device="cpu")
    job = silo_job(task, sizes=[20, 20, 9, 9, 9, 12, 1], training=training)
    others = {user: own for user, own in job.users.items() if user not in raising}
    spoiled = {
        user: Examples(own.features, torch.full_like(own.targets, label))
        for user, own in job.users.items()
        if user in raising
    }
    theirs = updates_of(task, replace(job, users=others))
    ours = updates_of(task, replace(job, users={u: (others | spoiled)[u] for u in job.users}))
    assert sorted(ours) == list(job.users)
    for user, update in ours.items():
        for name, part in update.items():
            assert torch.equal(part, theirs[user][name]) if user in theirs else not part.any()
    (said,) = [r for r in caplog.records if "count as zero" in r.message]
    assert said.levelname == ("ERROR" if len(raising) == 7 else "WARNING")
    assert f"for {len(raising)} of 7 users" in said.message


def test_a_user_whose_training_raises_is_encrypted_as_zero():
    task = Task(model=Scaled, data=lambda silo: silo, device="cpu")
    job, clipped = silo_job(task), {}
    job.users[1].targets[0] = 7
    silo = SimpleNamespace(
        counted=tuple(job.users),
        settings=SimpleNamespace(users=USERS),
        open_sum=lambda number, weights: SimpleNamespace(add=clipped.update),
    )
    message = {WEIGHTS: np.empty(0, np.uint8)}
    total = HiddenSum(silo, message, training_round=1, users=USERS, bound=0.1, like={})
    hidden = replace(job, total=total)
    silo_training.add_users(task, [hidden], trained=lambda name: True, memory_limit=2**30)
    assert sorted(clipped) == list(job.users)
    assert [user for user, update in clipped.items() if not update.any()] == [1]


def with_a_wrong_label(data, user=3):
    """Return data with a wrong label: one record of ``user`` in each silo that has some."""
    found = []
    for own in data:
        targets = own.train.targets.clone()
        targets[np.flatnonzero(own.owners == user)[:1]] = CLASSES + 5
        train = Examples(own.train.features, targets)
        found.append(SiloData(train=train, test=own.test, owners=own.owners))
    return found


@pytest.mark.parametrize("method", [UldpAvg, UldpSgd])
def test_one_wrong_label_moves_the_sum_by_at_most_the_clipping_norm(method):
    sampling, bound = FullParticipation(USERS), 0.01
    ours = sum_of(method, with_a_wrong_label(silos()), sampling, "equal", bound)
    theirs = sum_of(method, without(3, silos()), sampling, "equal", bound)
    assert np.linalg.norm(ours - theirs) <= 1e-6 * bound
    assert np.linalg.norm(ours - sum_of(method, silos(), sampling, "equal", bound)) <= bound * 1.001


def test_one_wrong_label_does_not_keep_a_silo_of_group_from_answering():
    strategy = grouped(2)
    run(strategy, with_a_wrong_label(silos()), rounds=1)
    assert strategy.refusals == []


@pytest.mark.parametrize("wrong", ["label", "diverging"])
def test_a_silo_of_naive_that_fails_moves_nothing_and_adds_its_noise(wrong):
    data = silos()
    if wrong == "label":
        data[1] = with_a_wrong_label(data)[1]
    else:
        data[1] = replace(
            data[1], train=Examples(data[1].train.features * 1e38, data[1].train.targets)
        )
    nothing = torch.zeros(0, dtype=torch.long)
    empty = Examples(torch.zeros(0, FEATURES), nothing)
    without_it = [data[0], replace(data[1], train=empty, owners=nothing), data[2]]
    strategies = [strategy_of(UldpNaive, plan=plan(), local=LOCAL, **COMMON) for _ in range(2)]
    close(run(strategies[0], data), run(strategies[1], without_it))
    assert strategies[0].refusals == []


def test_no_more_models_exist_at_a_time_than_one_batch_has(monkeypatch):
    sizes = []

    def watched(*args, **options):
        for group, rows in averaging_groups(*args, **options):
            sizes.append(len(group))
            yield group, rows

    averaging_groups = silo_training.train_groups
    monkeypatch.setattr(silo_training, "train_groups", watched)
    run(strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON), rounds=1, memory_limit=2**14)
    users = sum(len(torch.unique(one.owners)) for one in silos())
    assert sum(sizes) == users
    assert max(sizes) < users / 2


# Bad input -----------------------------------------------------------------------------------


def no_owners():
    one = silo(1)
    return ClientData(train=one.train, test=one.test)


@pytest.mark.parametrize("method", [UldpAvg, UldpSgd, UldpGroup])
@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (no_owners, "expected SiloData, because its field owners"),
        (lambda: silo(1, users=USERS + 5), "the reason is in its own log"),
    ],
)
def test_silos_whose_data_do_not_fit_are_named_before_the_first_round(method, bad, said):
    strategy = grouped(2) if method is UldpGroup else strategy_of(method, plan=plan(), **COMMON)
    with pytest.raises(FederationNotReady, match=r"partitions \[1\] cannot take part") as error:
        run(strategy, [silo(0), bad(), silo(2)])
    assert said in str(error.value)
    assert strategy.participations.rounds == 0


def test_empty_silos_and_users_without_silos_take_part_with_nothing():
    data = [silo(0), silo(1), silo(2, records_=0)]
    for strategy in (
        strategy_of(UldpAvg, plan=plan(), local=LOCAL, weighting="by-records", **COMMON),
        strategy_of(UldpSgd, plan=plan(), **COMMON),
        grouped(3),
    ):
        run(strategy, data)
        assert strategy.refusals == []
        assert strategy.participations.rounds == ROUNDS


def test_a_silo_without_test_examples_is_left_out_of_the_scores():
    one = silo(1)
    none = SiloData(train=one.train, test=one.test.subset([]), owners=one.owners)
    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    run(strategy, [silo(0), none, silo(2)])
    assert strategy.refusals == []
    assert set(strategy.run.client_metrics) == {0, 2}


def test_a_metric_undefined_in_one_silo_is_averaged_over_the_others():
    def share_of_class_0(outputs, targets):
        wanted = targets == 0
        return float(wanted.float().mean()) if wanted.any() else math.nan

    data = silos()
    none = data[1].test.targets != 0
    lacking = data[1].test.subset(torch.nonzero(none).flatten().numpy())
    data[1] = SiloData(train=data[1].train, test=lacking, owners=data[1].owners)
    problem = replace(task(data), metrics={"share": share_of_class_0})
    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    app = UldpAvg.client_app(problem, allow_seeded_noise=True)
    grid = InProcessGrid(app, num_clients=SILOS)
    strategy.start(grid, ArrayRecord(problem.initial_params(SEED)), num_rounds=1)
    assert strategy.refusals == []
    assert [sorted(scores) for scores in strategy.run.client_metrics.values()] == [
        ["loss", "num-examples", "share"],
        ["loss", "num-examples"],
        ["loss", "num-examples", "share"],
    ]
    row = strategy.run.progress.row
    shares = [share_of_class_0(None, data[number].test.targets) for number in (0, 2)]
    assert row["share_mean"] == pytest.approx(np.mean(shares))
    assert row["share_clients"] == 2


class Liar(InProcessGrid):
    """A grid in which silo 1 reports a false histogram."""

    told = None

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            asked = reply.metadata.message_type.startswith("query.uldp")
            told = reply.content.array_records.get("answer", {})
            if asked and "histogram" in told and reply.metadata.src_node_id == 1_001:
                answer = {**records.to_arrays(told), "histogram": self.told}
                reply.content["answer"] = records.to_record(answer)
        return replies


@pytest.mark.parametrize(
    "told",
    [
        np.full(USERS, -1),
        np.full(USERS, 2**62),
        np.full(USERS + 1, 3),
        np.full(USERS, 0.5),
        np.full((USERS, 1), 3),
    ],
)
def test_a_histogram_that_is_none_is_refused(told):
    strategy = strategy_of(UldpAvg, plan=plan(), weighting="by-records", **COMMON)
    grid = Liar(UldpAvg.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    grid.told = told
    with pytest.raises(FederationNotReady, match=r"partitions \[1\] cannot take part"):
        strategy.start(grid, ArrayRecord(task().initial_params(SEED)))


def test_a_user_whose_training_diverges_adds_nothing_and_nobody_sees_it():
    user, data = 3, silos()
    spoiled = []
    for own in data:
        features = own.train.features.clone()
        features[own.owners == user] = math.inf
        train = Examples(features, own.train.targets)
        spoiled.append(SiloData(train=train, test=own.test, owners=own.owners))
    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    close(
        run(strategy, spoiled),
        run(strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON), without(user, data)),
    )
    assert strategy.refusals == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: strategy_of(UldpAvg, plan=plan(noise_placement="server"), **COMMON),
            "noise_placement='server' of the plan",
        ),
        (
            lambda: strategy_of(UldpAvg, plan=plan(FixedSizeSampling(USERS, 3)), **COMMON),
            "expected FullParticipation or PoissonSampling",
        ),
        (lambda: strategy_of(UldpAvg, plan=plan(), **{**COMMON, "num_silos": 0}), "num_silos=0"),
        (lambda: strategy_of(UldpAvg, plan=plan(), weighting="fair", **COMMON), "weighting='fair'"),
        (lambda: UldpAvg(num_silos=SILOS, user_draw="protocol"), "user_draw='protocol': expected"),
        (lambda: UldpNaive(num_silos=0), "num_silos=0"),
        (
            lambda: strategy_of(UldpSgd, plan=plan(), local=LOCAL, **COMMON),
            "ULDP-SGD has no local training",
        ),
        (lambda: plan(PoissonSampling(USERS, 0.0)), r"rate=0\.0: expected a number in \(0, 1\]"),
        (lambda: plan(PoissonSampling(USERS, 1.1)), r"rate=1\.1"),
        (
            lambda: strategy_of(UldpNaive, plan=plan(PoissonSampling(USERS, 0.5)), **COMMON),
            "does not sample users",
        ),
        (lambda: grouped(0), "group_size=0: expected an integer >= 1"),
        (lambda: grouped("mean"), "group_size='mean'"),
        (lambda: grouped(2, num_users=0), "num_users=0"),
        (lambda: grouped(2, delta=1.0), r"delta=1\.0"),
        (lambda: grouped(2, local=replace(DP_SGD, noise_multiplier=0.0)), "noise_multiplier=0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_their_name(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_the_learning_rate_of_the_theory():
    assert theory_learning_rate(num_silos=5, num_users=100, epochs=4) == pytest.approx(100.0)
