"""Upcycled around strategies that do not use this package, and around those of this package."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
)

from flower_ext.algorithms import (
    Apple,
    DP2FedSAM,
    DPDitto,
    DPFedAvg,
    FedALA,
    FedAMP,
    FedDyn,
    Hosted,
    Scaffold,
    Upcycled,
)
from flower_ext.algorithms.upcycled import Decaying, extrapolated
from flower_ext.federation import FederatedStrategy, InProcessGrid, Sgd, Stragglers, client_app
from flower_ext.federation.messages import records
from flower_ext.federation.messages.for_mods import FOR_MODS
from flower_ext.federation.method_state import State
from flower_ext.privacy import (
    Budget,
    FixedSizeSampling,
    FullParticipation,
    Ledger,
    NonPrivatePlan,
    SecureSum,
    privacy_loss_of,
)
from flower_ext.runs import RunWriter
from flower_ext.training import LocalTraining, evaluate
from tests.support.plans import release_plan
from tests.support.strategies import strategy_of
from tests.support.worlds import client_data, task

# A foreign project: its clients walk towards points of their own

CLIENTS = 5
SIZES = [10.0 * (1 + client) for client in range(CLIENTS)]
POINTS = np.random.default_rng(7).normal(size=(CLIENTS, 8)).astype(np.float32)
PACE = 0.3
SHAPES = {"layer.weight": (3, 2), "layer.bias": (2,)}


def packed(flat, dtype=np.float32):
    """Return a flat vector as a model of two arrays."""
    first = np.asarray(flat[:6], dtype).reshape(3, 2)
    return ArrayRecord(
        {"layer.weight": Array(first), "layer.bias": Array(np.asarray(flat[6:], dtype))}
    )


def flat(record):
    return np.concatenate([record[name].numpy().ravel() for name in SHAPES])


START = np.linspace(-2, 2, 8, dtype=np.float32)
BYTES = sum(len(array.data) for array in packed(START).values())


def towards_own_point(w, client):
    return w + PACE * (POINTS[client].astype(w.dtype) - w)


def squared_distance(w, client):
    return float(((w.astype(np.float64) - POINTS[client]) ** 2).sum())


def foreign_app() -> ClientApp:
    """Return a plain Flower app: it returns arrays and num-examples, without this package."""
    app = ClientApp()

    @app.train()
    def _(message: Message, context: Context) -> Message:
        client, arrays = int(context.node_config["partition-id"]), message.content["arrays"]
        w = flat(arrays)
        metrics = {"num-examples": SIZES[client], "train_loss": squared_distance(w, client)}
        content = {
            "arrays": packed(towards_own_point(w, client), w.dtype),
            "metrics": MetricRecord(metrics),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        client, w = int(context.node_config["partition-id"]), flat(message.content["arrays"])
        metrics = {"num-examples": SIZES[client], "distance": squared_distance(w, client)}
        content = {"metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    return app


class HalfWay(FedAvg):
    """A strategy as a user writes it: FedAvg with half steps, which it announces to the clients."""

    def configure_train(self, server_round, arrays, config, grid):
        self.sent = flat(arrays)
        config["user-says"] = "half"
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return packed((self.sent + flat(arrays)) / 2), metrics


def averaging():
    return lambda m, w, models: np.average(models, axis=0, weights=SIZES)


def median():
    return lambda m, w, models: np.median(models, axis=0)


def half_way():
    return lambda m, w, models: (w + np.average(models, axis=0, weights=SIZES)) / 2


def momentum(rate, share):
    """Return a plain server step of FedAvgM."""
    velocity = 0.0

    def server(number, w, models):
        nonlocal velocity
        velocity = share * velocity + (w - np.average(models, axis=0, weights=SIZES))
        return w - rate * velocity

    return server


def adaptive(kind, eta, beta_1, beta_2, tau):
    """Return a plain server step of FedYogi, or of FedAdam for any other kind."""
    m = v = 0.0

    def server(number, w, models):
        nonlocal m, v
        step = np.average(models, axis=0, weights=SIZES) - w
        m = beta_1 * m + (1 - beta_1) * step
        if kind == "yogi":
            v = v - (1 - beta_2) * step**2 * np.sign(v - step**2)
            return w + eta * m / (np.sqrt(v) + tau)
        v = beta_2 * v + (1 - beta_2) * step**2
        unbiased = eta * np.sqrt(1 - beta_2 ** (number + 1)) / (1 - beta_1 ** (number + 1))
        return w + unbiased * m / (np.sqrt(v) + tau)

    return server


ADAPTIVE = {"eta": 0.3, "beta_1": 0.7, "beta_2": 0.9, "tau": 0.1}
BASES = {
    "FedAvg": (FedAvg, averaging),
    "FedAvgM": (
        lambda: FedAvgM(server_learning_rate=0.9, server_momentum=0.5),
        lambda: momentum(0.9, 0.5),
    ),
    "FedAdam": (lambda: FedAdam(**ADAPTIVE), lambda: adaptive("adam", **ADAPTIVE)),
    "FedYogi": (lambda: FedYogi(**ADAPTIVE), lambda: adaptive("yogi", **ADAPTIVE)),
    "FedMedian": (FedMedian, median),
    "a user's own": (HalfWay, half_way),
}


def by_hand(server, *, rounds, coefficient):
    """Return w̄⁰, …, w̄ᴿ of Algorithm 1 around ``server(m, w, local models)`` of its m-th round."""
    models = [START.astype(np.float64)]
    for t in range(1, rounds + 1):
        w = models[-1]
        if t % 2 == 0:
            c = coefficient(t // 2) if callable(coefficient) else coefficient
            models.append(w + c * (w - models[-2]))
        else:
            local = [towards_own_point(w, i) for i in range(CLIENTS)]
            models.append(server((t + 1) // 2, w, local))
    return models


def models_of(strategy, *, rounds, grid=None, start=START):
    """Return the model after every round, beginning with the initial one."""
    models = {0: start}
    strategy.start(
        grid or InProcessGrid(foreign_app(), num_clients=CLIENTS),
        packed(start, start.dtype),
        num_rounds=rounds,
        evaluate_fn=lambda t, arrays: models.__setitem__(t, flat(arrays)),
    )
    assert sorted(models) == list(range(len(models)))
    return [models[t] for t in sorted(models)]


def same(ours, theirs, tolerance=1e-5):
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("schedule", [0.6, Decaying(0.9)], ids=["constant", "decaying"])
@pytest.mark.parametrize("name", BASES)
def test_foreign_strategies_and_clients_follow_algorithm_1(name, schedule):
    base, server = BASES[name]
    ours = models_of(Upcycled(base(), schedule), rounds=8)
    same(ours, by_hand(server(), rounds=8, coefficient=schedule))


@pytest.mark.parametrize(
    "base",
    [
        lambda: FedAdagrad(eta=0.2, tau=0.1),
        lambda: FedProx(proximal_mu=0.1),
        lambda: FedTrimmedAvg(beta=0.3),
        lambda: Krum(num_malicious_nodes=1),
        lambda: MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2),
        lambda: QFedAvg(client_learning_rate=0.5, q=0.2),
        lambda: DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.0, 0.5, CLIENTS),
    ],
    ids=["Adagrad", "Prox", "TrimmedAvg", "Krum", "MultiKrum", "QFedAvg", "DP(FedAvg)"],
)
def test_odd_rounds_equal_the_rounds_of_any_base(base, monkeypatch):
    """They equal those of a new base strategy that plays the odd rounds one by one."""
    monkeypatch.setattr("gc.collect", lambda: 0)  # QFedAvg collects for each client and round
    driven, grid = base(), InProcessGrid(foreign_app(), num_clients=CLIENTS)

    def server(number, w, models):
        requests = driven.configure_train(number, packed(w), ConfigRecord(), grid)
        arrays, _ = driven.aggregate_train(number, grid.send_and_receive(requests))
        return flat(arrays).astype(np.float64)

    theirs = by_hand(server, rounds=4, coefficient=0.6)
    same(models_of(Upcycled(base(), 0.6), rounds=4), theirs)


@pytest.mark.parametrize("c", [0.2, 0.5])
def test_an_upcycled_step_is_one_plus_c_plain_steps_towards_one_minimum(c):
    centre = np.average(POINTS, axis=0, weights=SIZES)
    training_rounds = 4
    ours = models_of(Upcycled(FedAvg(), c), rounds=2 * training_rounds)[-1]
    same(ours - centre, (1 - PACE * (1 + c)) ** training_rounds * (START - centre))
    plain = models_of(FedAvg(), rounds=2 * training_rounds)

    def left(w):
        return np.linalg.norm(w - centre)

    assert left(plain[-1]) < left(ours) < left(plain[training_rounds])


@pytest.mark.parametrize("name", BASES)
def test_a_coefficient_of_zero_repeats_every_model_of_the_base(name):
    base, _ = BASES[name]
    plain = models_of(base(), rounds=4)
    upcycled = models_of(Upcycled(base(), 0), rounds=8)
    same(upcycled[1::2], plain[1:], tolerance=1e-6)
    np.testing.assert_array_equal(upcycled[2::2], upcycled[1::2])


def test_flowers_fedavgm_continues_from_the_extrapolated_model_not_its_copy():
    base = FedAvgM(server_learning_rate=0.9, server_momentum=0.5)
    models = models_of(Upcycled(base, 0.8), rounds=7)
    same(models, by_hand(momentum(0.9, 0.5), rounds=7, coefficient=0.8))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda base: DifferentialPrivacyServerSideFixedClipping(base, 0.0, 1e6, CLIENTS),
        lambda base: DifferentialPrivacyServerSideAdaptiveClipping(
            base, 0.0, CLIENTS, initial_clipping_norm=1e6, clipped_count_stddev=0.0
        ),
    ],
    ids=["fixed clipping", "adaptive clipping"],
)
def test_a_fedavgm_inside_flowers_wrappers_continues_from_the_extrapolated_model(wrap):
    base = wrap(FedAvgM(server_learning_rate=0.9, server_momentum=0.5))
    models = models_of(Upcycled(base, 0.8), rounds=4)
    same(models, by_hand(momentum(0.9, 0.5), rounds=4, coefficient=0.8))


# Messages


class Recorder(InProcessGrid):
    """A grid that records each message as it passes, and may lose some answers."""

    def __init__(self, *args, lose=lambda seen: False, **how):
        super().__init__(*args, **how)
        self.lose = lose
        self.seen = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        requests = [self.note(message, "down") for message in messages]
        rounds = {seen["node"]: seen["round"] for seen in requests}
        replies = []
        for reply in super().send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            seen = self.facts(reply, "up", node, rounds.get(node))
            if not self.lose(seen):
                self.seen.append(seen)
                replies.append(reply)
        return replies

    def note(self, message, way):
        config = message.content.config_records.get("config", {})
        number = message.metadata.group_id or config.get("server-round")
        number = int(number) if number else None
        self.seen.append(self.facts(message, way, message.metadata.dst_node_id, number))
        return self.seen[-1]

    def facts(self, message, way, node, number):
        content = message.content if message.has_content() else RecordDict()
        return {
            "kind": message.metadata.message_type.partition(".")[0],
            "way": way,
            "node": node,
            "round": number,
            "bytes": sum(
                len(array.data)
                for record in content.array_records.values()
                for array in record.values()
            ),
            "config": {name: dict(record) for name, record in content.config_records.items()},
        }

    def of(self, kind, number, way=None):
        return [
            seen
            for seen in self.seen
            if (seen["kind"], seen["round"]) == (kind, number) and way in (None, seen["way"])
        ]


def flower_recorder(**how):
    return Recorder(foreign_app(), num_clients=CLIENTS, **how)


NODES = 6
FAST = LocalTraining(epochs=1, batch_size=10)
LONG = LocalTraining(epochs=5, batch_size=16, learning_rate=0.1)
DECAYING = LocalTraining(epochs=5, batch_size=8, learning_rate=0.1, learning_rate_decay=0.8)
SAMPLING = FixedSizeSampling(NODES, 4)
PLAIN = NonPrivatePlan(sampling=SAMPLING)


def recorder(**how):
    """Return a grid of this package's clients, for any method."""
    methods = (method.client for method in (DPFedAvg, DP2FedSAM, FedDyn, Scaffold))
    app = client_app(*methods, task=task(), allow_seeded_noise=True)
    return Recorder(app, num_clients=NODES, **how)


def initial(seed=0):
    return ArrayRecord(task().initial_params(seed))


private_plan = partial(release_plan, NODES, sampling=SAMPLING)


def private(method, **options):
    names = ("head", "extractor") if issubclass(method, DP2FedSAM) else ("local",)
    settings = {"plan": private_plan(), "seed": 3, "seeded_noise": True, "evaluate_every": 0}
    return strategy_of(method, **{**dict.fromkeys(names, FAST), **settings, **options})


def models_of_ours(strategy, *, rounds, grid=None):
    """Return the model after every round, as arrays by name."""
    models = []
    result = strategy.start(
        grid or recorder(),
        initial(),
        num_rounds=rounds,
        evaluate_fn=lambda t, arrays: models.append(records.to_arrays(arrays)),
    )
    names = set(result.arrays)
    return [{n: a for n, a in model.items() if n in names} for model in models]


def moved_on(models, coefficient):
    """Return the expected model of an even round, from those of the two rounds before."""
    before, after = models
    return {n: after[n] + coefficient * (after[n] - before[n]) for n in after}


def alike(one, other, tolerance=1e-6):
    assert set(one) == set(other)
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance)


def differ(one, other):
    return any(not np.allclose(one[name], other[name], atol=1e-6) for name in one)


@pytest.mark.parametrize("base", [FedAvg, FedMedian, FedYogi])
def test_even_rounds_of_flowers_strategies_send_nothing_to_train(base):
    grid, strategy = flower_recorder(), Upcycled(base(), 0.5)
    strategy.start(grid, packed(START), num_rounds=6)
    for t in range(1, 7):
        assert len(grid.of("evaluate", t, "down")) == CLIENTS
    for number in (1, 2, 3):
        requests, answered = grid.of("train", number, "down"), grid.of("train", number, "up")
        assert len(requests) == len(answered) == CLIENTS
        assert sum(seen["bytes"] for seen in requests + answered) == 2 * CLIENTS * BYTES
    assert len([seen for seen in grid.seen if seen["kind"] == "train"]) == 3 * 2 * CLIENTS
    assert not [seen for seen in grid.seen if seen["round"] is None]


@pytest.mark.parametrize(
    "base",
    [
        lambda directory: private(DPFedAvg, directory=directory, evaluate_every=1),
        lambda directory: private(DP2FedSAM, directory=directory, evaluate_every=1),
        lambda directory: FederatedStrategy(
            Scaffold(local=FAST), PLAIN, seed=1, directory=directory
        ),
        lambda directory: FederatedStrategy(
            Hosted(FedAvg(), local=FAST), PLAIN, seed=1, directory=directory
        ),
    ],
    ids=["DP-FedAvg", "DP2-FedSAM", "SCAFFOLD", "Hosted"],
)
def test_even_rounds_send_nothing_but_are_evaluated(base, tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    grid = recorder()
    strategy = Upcycled(base(run), 0.5)
    strategy.start(grid, initial(), num_rounds=6)
    rows = {row["round"]: row for row in run.metrics()}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    for t, row in rows.items():
        down, up = grid.of("train", t, "down"), grid.of("train", t, "up")
        assert len(down) == len(up) == row["cohort"] == (4 if t % 2 else 0)
        assert row["messages"] == len(down) + len(up)
        assert row["bytes_down"] == sum(seen["bytes"] for seen in down)
        assert row["bytes_up"] == sum(seen["bytes"] for seen in up)
        assert (row["bytes_down"] > 0) == (row["bytes_up"] > 0) == (t % 2 == 1)
        assert len(grid.of("evaluate", t, "down")) == row["evaluation_messages"] / 2 == NODES
        assert "accuracy_mean" in row


# Evaluation


def test_flowers_evaluation_scores_the_extrapolated_model_in_even_rounds():
    theirs = by_hand(averaging(), rounds=4, coefficient=0.7)
    result = Upcycled(FedAvg(), 0.7).start(flower_recorder(), packed(START), num_rounds=4)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2, 3, 4]
    for t in range(1, 5):
        distances = [squared_distance(theirs[t], client) for client in range(CLIENTS)]
        expected = np.average(distances, weights=SIZES)
        assert result.evaluate_metrics_clientapp[t]["distance"] == pytest.approx(expected, rel=1e-4)


def test_our_evaluation_scores_the_extrapolated_model_in_even_rounds():
    strategy = Upcycled(FederatedStrategy(Scaffold(local=FAST), PLAIN, seed=1), 0.7)
    models = []
    result = strategy.start(
        recorder(),
        initial(),
        num_rounds=4,
        evaluate_fn=lambda t, arrays: models.append(records.to_params(arrays)),
    )
    for t in (2, 4):
        expected = {
            n: models[t - 1][n] + 0.7 * (models[t - 1][n] - models[t - 2][n]) for n in models[t]
        }
        losses = [
            evaluate(task(), expected, client_data(client).test)["loss"] for client in range(NODES)
        ]
        scores = result.evaluate_metrics_clientapp
        assert scores[t]["loss_mean"] == pytest.approx(np.mean(losses), abs=1e-5)
        assert scores[t]["loss_mean"] != pytest.approx(scores[t - 1]["loss_mean"], abs=1e-4)


def test_even_rounds_report_their_coefficient_and_odd_ones_the_bases_metrics():
    result = Upcycled(FedAvg(), Decaying(0.8)).start(flower_recorder(), packed(START), num_rounds=4)
    metrics = result.train_metrics_clientapp
    assert [dict(metrics[t]) for t in (2, 4)] == [
        {"upcycling-coefficient": pytest.approx(0.8 / math.sqrt(m))} for m in (1, 2)
    ]
    assert set(metrics[1]) == set(metrics[3]) == {"train_loss"}


# Privacy


@pytest.mark.parametrize("method", [DPFedAvg, DP2FedSAM])
def test_twice_the_rounds_spend_what_the_base_spends_in_half_of_them(method, tmp_path):
    alone = private(method, ledger=Ledger(tmp_path / "alone"))
    alone.start(recorder(), initial(), num_rounds=3)
    base = private(method, ledger=Ledger(tmp_path / "upcycled"))
    strategy = Upcycled(base, 0.5)
    models = models_of_ours(strategy, rounds=6)

    entries = Ledger.read(tmp_path / "upcycled")
    assert [(e["kind"], e["round"]) for e in entries] == [
        (kind, t) for t in (1, 3, 5) for kind in ("reserve", "commit")
    ]
    releases = [e["release"] for e in entries if e["kind"] == "reserve"]
    assert releases == [
        e["release"] for e in Ledger.read(tmp_path / "alone") if e["kind"] == "reserve"
    ]
    assert strategy.guarantees() == alone.guarantees()
    assert 0 < strategy.guarantees()[0].epsilon < math.inf
    assert strategy.participations.rounds == 3
    for t in (2, 4, 6):
        alike(models[t], moved_on(models[t - 2 : t], 0.5))
        assert differ(models[t], models[t - 1])


@pytest.mark.parametrize("affordable", [1, 3])
def test_rounds_continue_until_the_budget_ends_and_return_the_last_model(affordable, tmp_path):
    plan = private_plan()

    def epsilon(releases):
        return privacy_loss_of({DPFedAvg().mechanism(plan).release: releases}, delta=0.1).epsilon

    budget = Budget(epsilon=(epsilon(affordable) + epsilon(affordable + 1)) / 2, delta=0.1)
    run = RunWriter.create(tmp_path / "run", {})
    base = private(
        DPFedAvg, plan=plan, ledger=Ledger(run.ledger_path, budget=budget), directory=run
    )
    grid, strategy = recorder(), Upcycled(base, 0.5)
    models = models_of_ours(strategy, rounds=20, grid=grid)

    assert len(models) - 1 == len(run.metrics()) == 2 * affordable
    assert f"round {2 * affordable + 1} would bring the spend" in strategy.stopped
    assert [(e["kind"], e["round"]) for e in run.ledger()] == [
        (kind, 2 * m - 1) for m in range(1, affordable + 1) for kind in ("reserve", "commit")
    ]
    assert {seen["round"] for seen in grid.seen if seen["kind"] == "train"} == {
        2 * m - 1 for m in range(1, affordable + 1)
    }
    unlimited = models_of_ours(Upcycled(private(DPFedAvg, plan=plan), 0.5), rounds=2 * affordable)
    alike(models[-1], unlimited[-1])
    assert "configure_train" not in vars(base)


def test_a_run_that_its_budget_stops_returns_the_last_extrapolated_model(tmp_path):
    plan = private_plan()
    once = privacy_loss_of({DPFedAvg().mechanism(plan).release: 1}, delta=0.1).epsilon
    ledger = Ledger(tmp_path / "ledger", budget=Budget(epsilon=1.001 * once, delta=0.1))
    strategy, seen = Upcycled(private(DPFedAvg, plan=plan, ledger=ledger), 0.5), {}
    result = strategy.start(
        recorder(),
        initial(),
        num_rounds=9,
        evaluate_fn=lambda t, arrays: seen.__setitem__(t, records.to_arrays(arrays)),
    )
    assert sorted(seen) == [0, 1, 2]
    alike(records.to_arrays(result.arrays), seen[2])
    alike(seen[2], moved_on([records.to_arrays(initial()), seen[1]], 0.5))


def test_a_budget_ends_the_run_after_its_last_extrapolation(tmp_path):
    plan = private_plan()
    once = privacy_loss_of({DPFedAvg().mechanism(plan).release: 1}, delta=0.1).epsilon
    ledger = Ledger(tmp_path / "ledger", budget=Budget(epsilon=1.001 * once, delta=0.1))
    strategy = Upcycled(private(DPFedAvg, plan=plan, ledger=ledger), 0.5)
    grid = recorder()
    result = strategy.start(grid, initial(), num_rounds=9)
    assert strategy.stopped is not None
    assert {seen["round"] for seen in grid.seen if seen["kind"] == "train"} == {1}
    assert sorted(result.train_metrics_clientapp) == [1, 2]


# Lost rounds


def test_the_log_says_that_half_of_the_rounds_release_something(caplog):
    caplog.set_level("INFO", logger="flwr")
    everyone = FullParticipation(4)
    Upcycled(strategy_of(DPFedAvg, plan=NonPrivatePlan(sampling=everyone))).summary()
    assert "coefficient 0.5 · even rounds reuse models: N rounds spend N/2 releases" in caplog.text


def test_after_a_round_that_nobody_answers_the_even_round_changes_nothing():
    grid = flower_recorder(lose=lambda seen: seen["kind"] == "train" and seen["round"] == 2)
    models = models_of(Upcycled(FedAvg(), 0.6), rounds=6, grid=grid)
    np.testing.assert_array_equal(models[3], models[2])
    np.testing.assert_array_equal(models[4], models[2])
    same(models[6], models[5] + 0.6 * (models[5] - models[4]))
    assert np.abs(models[6] - models[5]).max() > 0.01


def test_after_a_discarded_private_round_the_even_round_changes_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    plan = private_plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.0))
    lost = set()

    def one_of_round_three(seen):
        if (seen["kind"], seen["round"]) != ("train", 3) or lost:
            return False
        lost.add(seen["node"])
        return True

    strategy = Upcycled(private(DPFedAvg, plan=plan, ledger=ledger), 0.6)
    models = models_of_ours(strategy, rounds=6, grid=recorder(lose=one_of_round_three))
    assert lost
    alike(models[3], models[2], tolerance=0)
    alike(models[4], models[2], tolerance=0)
    assert differ(models[6], models[5])
    kinds = [(e["kind"], e["round"]) for e in Ledger.read(ledger.path)]
    assert kinds == [
        *[("reserve", 1), ("commit", 1)],
        *[("reserve", 3), ("discard", 3)],
        *[("reserve", 5), ("commit", 5)],
    ]


def test_after_a_lost_round_scaffolds_control_stays_where_it_was():
    base = FederatedStrategy(Scaffold(local=FAST), PLAIN, seed=1)
    controls = {}

    def note(number, arrays):
        if number:
            controls[number] = dict(base.run.state.everyone["control"])

    Upcycled(base, 0.6).start(
        recorder(lose=lambda seen: seen["kind"] == "train" and seen["round"] == 3),
        initial(),
        num_rounds=6,
        evaluate_fn=note,
    )
    zero = {n: np.zeros_like(c) for n, c in controls[1].items()}
    alike(controls[2], moved_on([zero, controls[1]], 0.6))
    alike(controls[3], controls[2], tolerance=0)
    alike(controls[4], controls[2], tolerance=0)
    alike(controls[6], moved_on([controls[4], controls[5]], 0.6))
    assert differ(controls[6], controls[5])


# The same seeds


@pytest.mark.parametrize(
    "base",
    [
        lambda **how: strategy_of(Scaffold, plan=PLAIN, local=LONG, **how),
        lambda **how: strategy_of(FedDyn, plan=PLAIN, local=LONG, **how),
        lambda **how: strategy_of(Hosted, FedYogi(), plan=PLAIN, local=LONG, **how),
    ],
    ids=["SCAFFOLD", "FedDyn", "Hosted"],
)
def test_upcycling_keeps_the_clients_and_stragglers_of_a_round(base):
    def asked(strategy, rounds):
        grid = recorder()
        strategy.start(grid, initial(), num_rounds=rounds)
        by_round = [grid.of("train", t, "down") for t in range(1, rounds + 1)]
        return [
            sorted((seen["node"], seen["config"]["training.local"]["epochs"]) for seen in one)
            for one in by_round
        ]

    options = {"seed": 5, "stragglers": Stragglers(ratio=0.5), "evaluate_every": 0}
    plain = asked(base(**options), 5)
    upcycled = asked(Upcycled(base(**options), 0.5), 10)
    assert upcycled[0::2] == plain
    assert not any(upcycled[1::2])
    assert all(len(cohort) == 4 for cohort in plain)
    assert {epochs < 5 for cohort in plain for _, epochs in cohort} == {True, False}
    assert len({str(cohort) for cohort in plain}) > 1  # otherwise there is nothing to compare


@pytest.mark.parametrize(
    "base",
    [
        lambda **how: strategy_of(Scaffold, plan=PLAIN, local=DECAYING, **how),
        lambda **how: strategy_of(FedDyn, plan=PLAIN, local=DECAYING, **how),
        lambda **how: strategy_of(Hosted, FedYogi(), plan=PLAIN, local=DECAYING, **how),
        lambda **how: private(DPFedAvg, local=DECAYING, **how),
        lambda **how: private(DPFedAvg, plan=private_plan(noise_placement="server"), **how),
        lambda **how: private(DP2FedSAM, extractor=DECAYING, **how),
    ],
    ids=["SCAFFOLD", "FedDyn", "Hosted", "DP-FedAvg", "server noise", "DP2-FedSAM"],
)
def test_without_extrapolation_twice_the_rounds_are_the_plain_run(base):
    options = {"seed": 5, "stragglers": Stragglers(ratio=0.5), "evaluate_every": 0}
    plain = models_of_ours(base(**options), rounds=3)
    upcycled = models_of_ours(Upcycled(base(**options), 0), rounds=6)
    for m in (1, 2, 3):
        alike(upcycled[2 * m - 1], plain[m], tolerance=0)
        alike(upcycled[2 * m], plain[m], tolerance=0)
        assert differ(plain[m], plain[m - 1])


# The wrapper itself


def test_a_base_that_is_no_strategy_is_refused():
    with pytest.raises(TypeError, match="expected a flwr.serverapp strategy"):
        Upcycled(FedAvg)  # the class, not an instance
    with pytest.raises(TypeError, match="base=None"):
        Upcycled(None)


@pytest.mark.parametrize("bad", ["0.5", None, [0.5]])
def test_a_coefficient_that_is_no_number_or_schedule_is_refused(bad):
    with pytest.raises(TypeError, match="expected a number, or a function that takes m"):
        Upcycled(FedAvg(), bad)


def test_a_strategy_is_not_upcycled_twice():
    with pytest.raises(TypeError, match="upcycled already"):
        Upcycled(Upcycled(FedAvg()))


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_a_number_that_is_no_coefficient_is_refused_at_once(bad):
    with pytest.raises(ValueError, match=f"coefficient={bad!r}: expected a finite number >= 0"):
        Upcycled(FedAvg(), bad)


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_a_schedule_that_fails_is_named_and_leaves_the_base_unchanged(bad):
    base = FedAvg()
    strategy = Upcycled(base, lambda m: 0.5 if m == 1 else bad)
    with pytest.raises(ValueError, match=rf"coefficient\(2\)={bad!r}: expected a finite"):
        models_of(strategy, rounds=6)
    works_alone(base)


def works_alone(base):
    assert not {"configure_train", "aggregate_train"} & set(vars(base))
    same(models_of(base, rounds=3), models_of(FedAvg(), rounds=3), tolerance=1e-6)


def test_after_a_run_the_base_works_alone_again():
    base = FedAvg()
    models_of(Upcycled(base, 0.5), rounds=4)
    works_alone(base)


def test_after_a_run_that_breaks_off_the_base_works_alone_again():
    class Breaking(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            raise ConnectionError("the network is gone")

    base = FedAvg()
    with pytest.raises(ConnectionError, match="the network is gone"):
        Upcycled(base, 0.5).start(Breaking(foreign_app(), CLIENTS), packed(START))
    works_alone(base)


def test_after_a_run_the_base_keeps_methods_that_were_set_on_it():
    base, called = FedAvg(), []
    method_of_base = base.aggregate_train

    def logged(server_round, replies):
        called.append(server_round)
        return method_of_base(server_round, replies)

    base.aggregate_train = logged
    models_of(Upcycled(base, 0.5), rounds=4)
    assert called == [1, 2]
    assert base.aggregate_train is logged


def test_a_wrapper_runs_again_from_the_start():
    strategy = Upcycled(FedAvg(), 0.5)
    first = models_of(strategy, rounds=4)
    same(models_of(strategy, rounds=4), first, tolerance=1e-6)


def test_a_run_may_end_with_an_odd_round():
    models = models_of(Upcycled(FedAvg(), 0.5), rounds=3)
    same(models, by_hand(averaging(), rounds=3, coefficient=0.5))


def test_what_the_base_offers_is_found_at_the_wrapper_and_nothing_else():
    base = private(DPFedAvg)
    strategy = Upcycled(base, 0.5)
    assert strategy.run.plan is base.run.plan
    assert strategy.stopped is None
    assert strategy.guarantees() == []
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = strategy.no_such_thing


# Arrays


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_extrapolation_keeps_types_and_shapes(dtype):
    rng = np.random.default_rng(0)
    before, after = (rng.normal(size=(2, 3, 1)).astype(dtype) for _ in range(2))
    old, new = ({"a": a, "none": np.zeros((0, 4), dtype)} for a in (before, after))
    moved = extrapolated(old, new, 2)
    assert {array.dtype for array in moved.values()} == {np.dtype(dtype)}
    assert [moved["a"].shape, moved["none"].shape] == [(2, 3, 1), (0, 4)]
    wide = after.astype(np.float64) + 2 * (after.astype(np.float64) - before.astype(np.float64))
    np.testing.assert_array_equal(moved["a"], wide.astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_extrapolation_keeps_a_parameter_without_dimensions(dtype):
    before, after = ({"scale": np.asarray(n, dtype)} for n in (1, 3))
    moved = extrapolated(before, after, 1.0)["scale"]
    assert moved == (3 if dtype == np.int64 else 5)
    assert isinstance(moved, np.ndarray)
    assert moved.shape == ()


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_extrapolation_leaves_whole_numbers_as_they_are(dtype):
    counts = np.array([20, 4, 0, 1], dtype)
    before = {"n": np.array([10, 0, 9, 0], dtype), "w": np.array([1.0])}
    after = {"n": counts, "w": np.array([2.0])}
    moved = extrapolated(before, after, 0.5)
    assert moved["n"].dtype == dtype
    np.testing.assert_array_equal(moved["n"], counts)
    assert moved["w"].tolist() == [2.5]


def test_extrapolation_changes_neither_of_its_models():
    before, after = {"w": np.array([1.0, 2.0])}, {"w": np.array([3.0, 3.0])}
    extrapolated(before, after, 0.5)
    assert before["w"].tolist() == [1.0, 2.0]
    assert after["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_a_run_keeps_the_type_of_its_model(dtype):
    models = models_of(Upcycled(FedAvg(), 0.6), rounds=4, start=START.astype(dtype))
    assert {model.dtype for model in models} == {np.dtype(dtype)}
    tolerance = 1e-2 if dtype == np.float16 else 1e-12
    theirs = by_hand(averaging(), rounds=4, coefficient=0.6)
    same(models, theirs, tolerance)


# Flower's servers with this package's cohorts


EVERYONE = NonPrivatePlan(sampling=FullParticipation(CLIENTS))


@pytest.mark.parametrize(
    "upcycle", [lambda base: base, lambda base: Upcycled(base, 0.6)], ids=["plain", "upcycled"]
)
@pytest.mark.parametrize("name", BASES)
def test_a_hosted_server_makes_the_models_that_it_makes_alone(name, upcycle):
    base, _ = BASES[name]
    hosted = FederatedStrategy(Hosted(base()), EVERYONE, evaluate_every=0)
    ours = models_of(upcycle(hosted), rounds=6)
    assert hosted.refusals == []
    same(ours, models_of(upcycle(base()), rounds=6))


def test_a_hosted_fedadam_corrects_its_moments_by_its_steps_despite_lost_rounds():
    grid = flower_recorder(lose=lambda seen: seen["kind"] == "train" and seen["round"] == 2)
    models = models_of(
        FederatedStrategy(Hosted(FedAdam(**ADAPTIVE)), EVERYONE, evaluate_every=0),
        rounds=4,
        grid=grid,
    )
    np.testing.assert_array_equal(models[2], models[1])
    alone = models_of(FedAdam(**ADAPTIVE), rounds=3)
    same([models[1], *models[3:]], alone[1:])


def test_a_hosted_server_keeps_counting_its_steps_in_a_new_process():
    def hosted():
        return FederatedStrategy(Hosted(FedAdam(**ADAPTIVE)), EVERYONE, evaluate_every=0)

    whole = models_of(hosted(), rounds=4)
    first, second = hosted(), hosted()
    middle = models_of(first, rounds=2)[-1]
    second.run.state = State.of_groups(first.run.state.groups())  # as from a checkpoint
    same(models_of(second, rounds=2, start=middle), whole[2:])


@pytest.mark.parametrize("grid", [recorder, flower_recorder], ids=["ours", "foreign"])
def test_a_hosted_fedprox_tells_clients_its_proximal_weight_and_the_users_configuration(grid):
    ours, grid = grid is recorder, grid()
    sampling = FixedSizeSampling(len(grid.contexts), 4)
    strategy = FederatedStrategy(
        Hosted(FedProx(proximal_mu=0.7), local=FAST), NonPrivatePlan(sampling=sampling)
    )
    arrays = initial() if len(grid.contexts) == NODES else packed(START)
    strategy.start(grid, arrays, num_rounds=1, train_config=ConfigRecord({"mine": 5}))
    requests = [seen for seen in grid.seen if (seen["kind"], seen["way"]) == ("train", "down")]
    assert len(requests) == 4
    for seen in requests:
        settings = seen["config"]["config"].items()
        configuration = {name: value for name, value in settings if not name.startswith(FOR_MODS)}
        assert configuration == {"mine": 5, "proximal-mu": 0.7, "server-round": 1}
        trainings = {n: c for n, c in seen["config"].items() if n.startswith("training.")}
        if ours:
            assert trainings["training.local"]["proximal_weight"] == 0.7
        else:
            assert not trainings


def test_a_hosted_fedprox_trains_as_fedavg_under_the_same_proximal_weight():
    def final(server, weight):
        local = replace(LONG, proximal_weight=weight)
        strategy = FederatedStrategy(Hosted(server, local=local), PLAIN, seed=2, evaluate_every=0)
        return models_of_ours(strategy, rounds=2)[-1]

    prox = final(FedProx(proximal_mu=0.7), 0.0)
    alike(prox, final(FedAvg(), 0.7))
    assert differ(prox, final(FedAvg(), 0.0))


@pytest.mark.parametrize(
    ("server", "options", "message"),
    [
        (FedAvg, {"server": Sgd(learning_rate=0.5)}, r"server=Sgd.* FedAvg takes"),
        (
            lambda: FedProx(proximal_mu=0.0),
            {"local": LocalTraining(proximal_weight=0.5)},
            r"proximal_weight=0\.5: expected FedProx's proximal_mu=0\.0",
        ),
        (lambda: QFedAvg(client_learning_rate=0.1), {}, "strategy=QFedAvg: .* training loss"),
        (FedXgbBagging, {}, "strategy=FedXgbBagging: expected .* needs trees"),
    ],
)
def test_a_hosted_server_refuses_what_it_would_not_heed(server, options, message):
    with pytest.raises(ValueError, match=message):
        strategy_of(Hosted, server(), plan=EVERYONE, **options)


def test_a_hosted_server_weighs_clients_by_their_examples():
    (model,) = models_of(FederatedStrategy(Hosted(FedAvg()), EVERYONE, evaluate_every=0), rounds=1)[
        1:
    ]
    local = [towards_own_point(START, client) for client in range(CLIENTS)]
    same(model, np.average(local, axis=0, weights=SIZES))
    assert np.abs(model - np.mean(local, axis=0)).max() > 0.01


def test_a_hosted_server_refuses_a_client_that_does_not_send_its_weight():
    app = ClientApp()

    @app.train()
    def _(message: Message, context: Context) -> Message:
        metrics = {} if context.node_config["partition-id"] == 2 else {"num-examples": 1.0}
        w = towards_own_point(flat(message.content["arrays"]), context.node_config["partition-id"])
        content = {"arrays": packed(w), "metrics": MetricRecord(metrics)}
        return Message(RecordDict(content), reply_to=message)

    strategy = FederatedStrategy(Hosted(FedAvg()), EVERYONE, evaluate_every=0)
    grid = InProcessGrid(app, num_clients=CLIENTS)
    (model,) = models_of(strategy, rounds=1, grid=grid)[1:]
    (refusal,) = strategy.refusals
    assert "'num-examples': expected a number above 0" in refusal
    same(model, np.mean([towards_own_point(START, i) for i in (0, 1, 3, 4)], axis=0))


@pytest.mark.parametrize("method", [FedAMP, Apple])
def test_a_base_that_sends_each_client_a_different_model_is_refused(method):
    base = strategy_of(method, plan=NonPrivatePlan(sampling=FullParticipation(3)))
    with pytest.raises(
        TypeError, match=f"base={method.__name__}: expected .* with one shared model"
    ):
        Upcycled(base)


@pytest.mark.parametrize("method", [DPDitto, FedALA])
def test_a_personalised_base_with_one_shared_model_is_not(method):
    strategy = Upcycled(strategy_of(method, plan=NonPrivatePlan(sampling=FullParticipation(3))))
    assert isinstance(strategy.base.method, method)
