"""The whole app in this process: nine methods, their run directories, and refused settings."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from flower_ext.federation import FederationNotReady, run_in_process
from flower_ext.privacy import AdversaryView, PrivacyUnit
from flower_ext.runs import RunDirectory
from tests.support.apps import ULDP_FL
from tests.support.grids import grid
from tests.support.silos import histogram

load_silos = ULDP_FL.module("silos").load_silos

AVERAGING = ("uldp-avg", "uldp-avg-w", "uldp-sgd", "uldp-sgd-w")
PRIVATE = ("uldp-avg-private", "uldp-sgd-private")
METHODS = (*AVERAGING, *PRIVATE, "uldp-naive", "uldp-group", "default")
SMALL_KEYS = {"key_bits": 512, "allow_insecure_keys": True, "max_records_per_user": 100}


def run(path, **overrides):
    server, client = ULDP_FL.parts()
    facts = {"num_users": 30, "rounds": 3, "evaluate_every": 2, **SMALL_KEYS, **overrides}
    settings = ULDP_FL.config(run_directory=str(path), **facts)
    run_in_process(server, client, num_clients=settings["num-silos"], run_config=settings)
    return RunDirectory.open(path)


@pytest.mark.report
@pytest.mark.figures
@pytest.mark.parametrize(
    "method",
    # A run of uldp-sgd-private is compared with one of plain weights below.
    grid(
        [method for method in METHODS if method != "uldp-sgd-private"],
        lambda method: method in ("uldp-avg-w", "uldp-group"),
    ),
)
def test_every_method_leaves_a_complete_run_directory(method, tmp_path):
    run_ = run(tmp_path / "run", method=method)
    files = {p.name for p in run_.path.iterdir()}
    expected = {"run.json", "metrics.jsonl", "model.safetensors", "clients.csv"}
    assert expected | {"report.md", "report.html", "figures", "guarantee.json"} <= files
    assert run_.status == "completed"
    rows = run_.metrics()
    assert [row["answered"] for row in rows] == [5, 5, 5]
    assert {"accuracy_mean", "accuracy_pooled"} <= set(rows[1])
    private = method != "default"
    assert ("epsilon_provable" in rows[1]) == private
    assert ("epsilon_published" in rows[1]) == private
    assert ("ledger.jsonl" in files) == (private and method != "uldp-group")
    guarantees = run_.guarantees()
    assert bool(guarantees) == private
    assert all(g.unit is PrivacyUnit.USER for g in guarantees)
    assert {g.basis for g in guarantees} == ({"published", "provable"} if private else set())
    text = (run_.path / "report.md").read_text(encoding="utf-8")
    assert ("how many records each user has in each silo" in text) == (
        method.endswith("-w") or method == "uldp-group"
    )
    for svg in (run_.path / "figures").glob("*.svg"):
        assert svg.with_suffix(".csv").exists()


@pytest.mark.parametrize(
    "method",
    grid((*AVERAGING, "uldp-naive"), lambda method: method == "uldp-avg-w"),
)
def test_silos_sums_are_secure_by_one_setting(method, tmp_path):
    settings = {"method": method, "seeded_noise": True, "rounds": 2, "server_learning_rate": 1.0}
    ours = run(tmp_path / "secure", aggregation="secure", **settings)
    plain = run(tmp_path / "plain", **settings)
    assert [row["answered"] for row in ours.metrics()] == [5, 5]
    sums = [
        one
        for one in ours.guarantees()
        if one.view is AdversaryView.SUM_ONLY and one.basis == "provable"
    ]
    assert any("at most 1 of each cohort of 5 collude" in text for text in sums[0].assumptions)
    mine, theirs = (load_file(one.path / "model.safetensors") for one in (ours, plain))
    # Both sum the same clipped updates in the first round. Noise has σC on a mean over 30 users
    # and 5 silos, in NAIVE 5 σC on a mean over 5 silos; 40 stddevs are far above any draw.
    stddev = 5.0 * 0.1 * (1 if method == "uldp-naive" else 6 / 30 / 5)
    for name in mine:
        assert np.abs(mine[name] - theirs[name]).max() < 40 * stddev


@pytest.mark.parametrize("method", ["uldp-group", "default", *PRIVATE])
def test_methods_without_a_secure_sum_of_silos_say_why(method, tmp_path):
    with pytest.raises(ValueError, match=f"aggregation='secure' with method='{method}'"):
        run(tmp_path / "run", method=method, aggregation="secure")


def test_sampling_users_costs_less_and_is_drawn_anew_each_round(tmp_path):
    rounds = 8  # all draw equally many users once in a million runs
    facts = {"method": "uldp-avg", "rounds": rounds, "evaluate_every": rounds}
    everyone = run(tmp_path / "everyone", **facts)
    sampled = run(tmp_path / "sampled", user_sampling_rate=0.3, **facts)
    assert [row["users"] for row in everyone.metrics()] == [30] * rounds
    assert len({row["users"] for row in sampled.metrics()}) > 1
    models = [
        next(g.epsilon for g in one.guarantees() if g.view is AdversaryView.RELEASED_MODELS)
        for one in (everyone, sampled)
    ]
    assert models[1] < 0.6 * models[0]


@pytest.mark.full
def test_private_weights_are_those_by_records(tmp_path):
    plain, private = (
        run(tmp_path / kind, method=f"uldp-sgd{kind}", seeded_noise=True)
        for kind in ("-w", "-private")
    )
    one, other = (load_file(each.path / "model.safetensors") for each in (plain, private))
    for name in one:
        np.testing.assert_allclose(other[name], one[name], atol=1e-5)
    for row, expected in zip(private.metrics(), plain.metrics(), strict=True):
        assert row.get("accuracy_mean") == pytest.approx(expected.get("accuracy_mean"), abs=1e-5)
    views = [[g.epsilon for g in each.guarantees()] for each in (plain, private)]
    assert views[0] == pytest.approx(views[1], rel=1e-6)


@pytest.mark.parametrize("rate", grid([1.0, 0.5], lambda rate: rate == 0.5))
def test_the_lattice_protocol_weighs_by_records_and_says_that_it_is_experimental(rate, tmp_path):
    facts = {"method": "uldp-avg-private", "protocol": "lattice", "max_records_per_user": 60}
    facts["rounds"] = 3 if rate == 1 else 1
    private = run(tmp_path / "run", **facts, user_sampling_rate=rate, seeded_noise=True)
    assert {row["answered"] for row in private.metrics()} == {5}
    assert not any(row.get("refused") for row in private.metrics())
    for guarantee in private.guarantees():
        names_the_experiment = any(
            "not externally reviewed" in text for text in guarantee.assumptions
        )
        # The paper's claim rests on a secure sum only if the server knows who took part.
        rests_on_the_sum = guarantee.basis == "provable" or rate == 1
        assert names_the_experiment == rests_on_the_sum
    if rate == 1:
        plain = run(tmp_path / "plain", method="uldp-avg-w", seeded_noise=True)
        one, other = (load_file(each.path / "model.safetensors") for each in (plain, private))
        for name in one:
            np.testing.assert_allclose(other[name], one[name], atol=1e-5)


@pytest.mark.full
def test_limits_of_silos_reach_the_protocol(tmp_path):
    data = load_silos("digits", num_users=30, num_silos=5, distribution="uniform", seed=1)
    limits = histogram(data, 30).max(axis=1)
    facts = {"method": "uldp-avg-private", "rounds": 1, "max_records_per_user": int(limits.sum())}
    limited, unlimited = (
        run(tmp_path / kind, **facts, silo_record_limits=text)
        for kind, text in (("limited", ",".join(map(str, limits))), ("unlimited", ""))
    )
    for run_, assumed in ((limited, 0), (unlimited, 3)):
        assert [row["answered"] for row in run_.metrics()] == [5]
        needed = [text for g in run_.guarantees() for text in g.assumptions]
        assert sum(text.startswith("every user has at most") for text in needed) == assumed


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["paillier", "lattice"])
def test_users_whom_not_even_the_server_knows_are_drawn(protocol, tmp_path):
    facts = {"protocol": protocol, "draw_choices": 5, "user_sampling_rate": 0.4, "rounds": 1}
    run_ = run(tmp_path / "run", method="uldp-avg-private", **facts)
    assert [row["answered"] for row in run_.metrics()] == [5]
    assert not any("users" in row for row in run_.metrics())
    models, sums = (
        next(g.epsilon for g in run_.guarantees() if g.view is view and g.basis == "provable")
        for view in (AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY)
    )
    assert models == sums


def test_weighting_by_records_learns_under_the_privacy_of_users(tmp_path):
    facts = {"num_users": 100, "rounds": 15, "evaluate_every": 15, "seeded_noise": True}
    accuracies = {
        method: run(tmp_path / method, method=method, **facts).metrics()[-1]["accuracy_mean"]
        for method in ("uldp-avg-w", "uldp-naive", "default")
    }
    assert accuracies["default"] > accuracies["uldp-avg-w"] > accuracies["uldp-naive"] + 0.2


@pytest.mark.parametrize("size", grid(["max", "median", "2"], lambda size: size == "median"))
def test_groups_of_any_size(size, tmp_path):
    run_ = run(tmp_path / "run", method="uldp-group", group_size=size, rounds=1)
    assert run_.status == "completed"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "uldp-avg2"}, "method='uldp-avg2': expected one of uldp-avg"),
        ({"dataset": "iris"}, "dataset='iris': expected one of digits"),
        ({"distribution": "even"}, "distribution='even': expected one of uniform, zipf"),
        ({"num_users": -1}, "num-users=-1"),
        ({"rounds": 0}, "rounds=0: expected an integer >= 1"),
        ({"num_silos": 0}, "num_silos=0|num_clients=0"),
        ({"clipping_norm": 0.0}, r"run-config clipping-norm=0\.0"),
        ({"noise_multiplier": 0.0}, r"run-config noise-multiplier=0\.0"),
        ({"delta": 0.0}, r"delta=0\.0"),
        ({"user_sampling_rate": 0.0}, r"rate=0\.0: expected a number in \(0, 1\]"),
        ({"user_sampling_rate": 1.5}, r"rate=1\.5"),
        ({"method": "uldp-naive", "user_sampling_rate": 0.5}, "does not sample users"),
        ({"method": "uldp-group", "group_size": "0"}, "group_size=0"),
        (
            {"method": "uldp-group", "group_size": "some"},
            "group-size='some': expected a whole number",
        ),
        ({"method": "uldp-group", "record_sampling_rate": 0.0}, r"record-sampling-rate=0\.0"),
        ({"method": "uldp-group", "dataset": "tcga-brca"}, "its loss compares patients"),
        ({"method": "uldp-avg-private", "allow_insecure_keys": False}, "key_bits=512"),
        ({"method": "uldp-avg-private", "allowed_totals": "ten"}, "allowed-totals='ten'"),
        ({"method": "uldp-avg-private", "allowed_totals": "10,999"}, r"allowed_totals=\(10, 999\)"),
        (
            {"method": "uldp-avg-private", "silo_record_limits": "50,fifty"},
            "silo-record-limits='50,fifty'",
        ),
        (
            {"method": "uldp-avg-private", "silo_record_limits": "20,20,20,20,21"},
            r"silo_record_limits=\(20, 20, 20, 20, 21\)",
        ),
        (
            {"method": "uldp-avg-private", "draw_choices": 4},
            "draw_choices=4: users are drawn at the rate 1; expected a multiple",
        ),
        ({"method": "uldp-sgd-private", "precision": 0.0}, r"precision=0\.0"),
        ({"method": "uldp-avg-private", "protocol": "rsa"}, "protocol='rsa': expected one of"),
        (
            {"method": "uldp-avg-private", "protocol": "lattice", "allowed_totals": "9"},
            "allowed-totals='9' with protocol='lattice'",
        ),
        (
            {"method": "uldp-avg-private", "protocol": "lattice", "silo_record_limits": "9,9"},
            r"silo_record_limits=\(9, 9\): expected 5 integers",
        ),
        ({"learning_rate": 0.0}, r"run-config learning-rate=0\.0"),
        ({"server_learning_rate": -1.0}, r"server-learning-rate=-1\.0"),
        ({"labels_per_user": 11}, "labels_per_user=11"),
        ({"model": "gpt"}, "model='gpt'"),
    ],
)
def test_bad_settings_end_the_run_with_the_name_of_the_setting(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **overrides)


def test_more_nodes_than_silos_are_refused(tmp_path):
    server, client = ULDP_FL.parts()
    settings = ULDP_FL.config(run_directory=str(tmp_path / "run"), num_silos=3)
    with pytest.raises(FederationNotReady, match="4 nodes are connected"):
        run_in_process(server, client, num_clients=4, run_config=settings)
