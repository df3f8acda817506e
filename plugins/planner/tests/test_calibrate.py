"""Noise, ε, rounds or sampling rate by ``flower-ext calibrate``, from the other three."""

import json

import pytest

from flower_ext.privacy import CorrelatedNoise, DpSgd, gaussian_loss
from flower_ext.privacy.accounting.group_privacy import group_loss
from flower_ext.privacy.theorems.dp2_fedsam_theorem import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
)
from flower_ext_planner.calibrate import noise_text
from flower_ext_planner.uldp_lemmas import group_loss_by_conversion, group_loss_by_renyi
from tests.support.commands import call, unboxed
from tests.support.grids import grid

PLANNED = ["--population", "100", "--sampling-rate", "0.1", "--rounds", "60"]
RUN = [*PLANNED, "--delta", "0.01"]


@pytest.fixture(scope="module")
def calibrated():
    done = call("calibrate", *RUN, "--epsilon", "2", "--json")
    assert done.exit_code == 0
    return json.loads(done.output)


@pytest.mark.full
def test_calibrate_gives_each_accounting_its_noise_and_none_overshoots(calibrated):
    assert (calibrated["unit"], calibrated["delta"]) == ("client", 0.01)
    noise = {row["calibrated by"]: row["noise_multiplier"] for row in calibrated["rows"]}
    for row in calibrated["rows"]:
        given = ["--noise-multiplier", str(row["noise_multiplier"])]
        rows = json.loads(call("calibrate", *RUN, *given, "--json").output)["rows"]
        (epsilon,) = (r["epsilon"] for r in rows if r["calibrated by"] == row["calibrated by"])
        assert epsilon == pytest.approx(2.0, rel=0.01)
        assert epsilon <= 2.0 + 1e-9
        assert row["relation"]
        assert row["basis"] in ("published", "provable")
    assert noise["Poisson, PLD"] < noise["fixed size, RDP"]
    assert noise["fixed size, RDP"] < noise["cohorts known"]
    assert noise["Theorem 2 (DP²-FedSAM)"] == pytest.approx(3.4309, abs=1e-4)


def test_calibrate_in_words_names_the_conditions_that_fail():
    done = call("calibrate", *RUN, "--epsilon", "2")
    assert done.exit_code == 0
    for word in ("1.1221", "one client of 100", "replace-one", "published", "not met", "2C"):
        assert word in done.output


def test_calibrate_turns_noise_into_epsilon():
    done = call("calibrate", *RUN[:2], "--cohort-size", "10", *RUN[4:], "--noise-multiplier", "2")
    assert done.exit_code == 0
    assert "σ = 2 · δ = 0.01 · T = 60 · r = 0.1" in done.output
    assert "Privacy loss" in done.output


@pytest.mark.parametrize(
    ("given", "name", "more"),
    grid(
        [
            (["--sampling-rate", "0.1"], "rounds", 1),
            (["--rounds", "60"], "sampling_rate", 0.01),
        ],
        lambda case: case[1] == "rounds",
    ),
)
def test_calibrate_turns_epsilon_and_noise_into_the_most_that_is_allowed(given, name, more):
    known = ["--population", "100", "--noise-multiplier", "2", "--delta", "0.01"]
    options = [*known, "--epsilon", "2", *given]
    answer = json.loads(call("calibrate", *options, "--json").output)
    stated = {each: answer[each] for each in ("unit", "epsilon", "noise_multiplier", "delta")}
    assert stated == {"unit": "client", "epsilon": 2, "noise_multiplier": 2, "delta": 0.01}
    rows = answer["rows"]
    assert all({"basis", "relation", "adversary sees"} <= set(row) for row in rows)
    by = {row["calibrated by"]: row[name] for row in rows}

    def epsilon(value):
        values = {"--sampling-rate": "0.1", "--rounds": "60"}
        values[f"--{name.replace('_', '-')}"] = str(value)
        words = [word for pair in values.items() for word in pair]
        done = call("calibrate", *known, *words, "--json")
        rows = json.loads(done.output)["rows"]
        return next(row["epsilon"] for row in rows if row["calibrated by"] == "Poisson, PLD")

    most = by["Poisson, PLD"]
    assert epsilon(most) <= 2 < epsilon(most + more)
    in_words = call("calibrate", *options)
    assert in_words.exit_code == 0
    assert f"{most:.3g}"[:4] in in_words.output


@pytest.mark.parametrize(("population", "delta"), [(1, 1e-3), (9, 1e-3), (100, 1e-4), (1000, 1e-5)])
def test_the_default_delta_is_small_for_the_population_and_gives_no_warning(population, delta):
    options = ["--population", str(population), "--sampling-rate", "1", "--rounds", "1"]
    done = call("calibrate", *options, "--noise-multiplier", "9")
    assert done.exit_code == 0
    assert "large" not in done.output
    stated = json.loads(call("calibrate", *options, "--noise-multiplier", "9", "--json").output)
    assert stated["delta"] == pytest.approx(delta)
    large = call("calibrate", *options, "--noise-multiplier", "9", "--delta", str(1 / population))
    assert large.exit_code == 2 if population == 1 else "far below" in large.output


OF_A_USER = ["--sampling-rate", "0.05", "--rounds", "50", "--delta", "1e-5", "--unit", "user"]


def test_calibrating_for_a_user_rounds_lemma_9_up_and_meets_the_target():
    options = ["--population", "100", *OF_A_USER, "--group-size", "5"]
    answer = json.loads(call("calibrate", *options, "--epsilon", "2", "--json").output)
    assert answer["unit"] == "user"
    noise = {row["calibrated by"]: row["noise_multiplier"] for row in answer["rows"]}
    assert list(noise) == [
        "Lemma 8 (Uldp-FL)",
        "Lemma 9 (Uldp-FL), 8 records",
        "mixture of Gaussians, PLD",
    ]
    silo = {"sampling_rate": 0.05, "steps": 50}
    for sigma, loss in zip(
        noise.values(), (group_loss_by_conversion, group_loss_by_renyi, group_loss), strict=True
    ):
        known = {"group_size": 5, "delta": 1e-5}
        assert loss(DpSgd(noise_multiplier=sigma, **silo), **known).epsilon <= 2
        assert loss(DpSgd(noise_multiplier=0.99 * sigma, **silo), **known).epsilon > 2
    assert (
        "one user of 100 with at most 5 records"
        in call("calibrate", *options, "--noise-multiplier", "9").output
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--unit", "user"], "--unit user and --group-size together"),
        (["--group-size", "4"], "--unit user and --group-size together"),
        (["--unit", "record"], "expected client or user"),
        (["--unit", "user", "--group-size", "4", "--cohort-size", "5"], "--cohort-size counts"),
    ],
)
def test_calibrate_refuses_options_of_another_unit(options, message):
    done = call("calibrate", "--population", "9", "--rounds", "3", "--epsilon", "1", *options)
    assert done.exit_code == 2
    assert message in unboxed(done.output)


def test_calibrate_for_a_user_computes_noise_or_epsilon_only():
    known = ["--sampling-rate", "0.1", "--epsilon", "1", "--noise-multiplier", "2"]
    done = call("calibrate", "--population", "9", *known, "--unit", "user", "--group-size", "4")
    assert "computes --epsilon or --noise-multiplier" in unboxed(done.output)


@pytest.mark.full
def test_calibrate_says_where_its_search_for_rounds_ended():
    options = ["--population", "100", "--sampling-rate", "0.01", "--noise-multiplier", "1e6"]
    assert "≥8388608" in call("calibrate", *options, "--epsilon", "2").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*RUN], "give three of --epsilon"),
        ([*RUN, "--epsilon", "1", "--noise-multiplier", "1"], "give three of --epsilon"),
        ([*RUN, "--cohort-size", "3", "--epsilon", "1"], "give --sampling-rate"),
        ([*RUN, "--epsilon", "-1"], "epsilon=-1.0"),
        ([*PLANNED, "--epsilon", "1", "--delta", "2"], "delta=2.0"),
        ([*RUN, "--noise-multiplier", "0"], "noise_multiplier=0.0"),
        (["--population", "100", "--rounds", "1", "--sampling-rate", "7", "--epsilon", "1"], "7"),
    ],
)
def test_bad_options_exit_with_2_and_say_what_to_change(arguments, message):
    done = call("calibrate", *arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_an_adversary_that_sees_uploads_is_accounted_without_amplification():
    rows = json.loads(call("calibrate", *RUN, "--noise-multiplier", "3.4309", "--json").output)
    epsilon = {row["calibrated by"]: row["epsilon"] for row in rows["rows"]}
    assert epsilon["cohorts known"] == pytest.approx(7.122, abs=1e-3)
    assert epsilon["uploads known"] == pytest.approx(41.233, abs=1e-3)


def test_clients_in_turn_are_accounted_for_their_participations_and_the_matrix():
    """Of 60 rounds, each of 100 clients in cohorts of ten takes part in six, ten rounds apart."""
    rows = json.loads(call("calibrate", *RUN, "--noise-multiplier", "3", "--json").output)["rows"]
    ways = {row["calibrated by"]: row for row in rows if row["calibrated by"].startswith("in turn")}
    independent, correlated = ways.values()
    assert "error of sums over rounds ÷ 2.1" in correlated["calibrated by"]
    matrix = CorrelatedNoise().matrix(60, rounds_apart=10, participations=6)
    moved = matrix.sensitivity(rounds_apart=10, participations=6)
    for row, worth in ((independent, 6), (correlated, moved**2)):
        exact = gaussian_loss(3.0, releases=worth, delta=0.01).epsilon
        assert row["epsilon"] == pytest.approx(exact, rel=1e-9)
        assert row["adversary sees"] == "released models and who took part"


@pytest.mark.parametrize("size", ["0", "200"])
def test_an_impossible_cohort_is_named_by_its_option(size):
    options = ["--population", "100", "--rounds", "60", "--epsilon", "1"]
    done = call("calibrate", *options, "--cohort-size", size)
    assert done.exit_code == 2
    assert "--cohort-size" in done.output


@pytest.mark.parametrize(
    "target",
    [pytest.param(("--epsilon", "2"), marks=pytest.mark.full), ("--noise-multiplier", "1")],
)
def test_no_word_of_a_table_is_cut_off_on_a_narrow_terminal(monkeypatch, target):
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in call("calibrate", *RUN, *target).output


@pytest.mark.parametrize(("population", "rate", "rounds"), [(100, 0.1, 60), (200, 0.05, 100)])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 1.7, 3.3, 5.0])
def test_a_printed_noise_meets_its_target(population, rate, rounds, epsilon):
    planned = {"sampling_rate": rate, "rounds": rounds, "delta": 1 / population}
    printed = float(noise_text(dp2_fedsam_theorem2_noise_multiplier(epsilon=epsilon, **planned)))
    assert dp2_fedsam_theorem2(noise_multiplier=printed, **planned).epsilon <= epsilon


@pytest.mark.full
def test_the_cohort_that_uploads_are_accounted_for_is_named(calibrated):
    (row,) = (row for row in calibrated["rows"] if row["calibrated by"] == "uploads known")
    assert row["adversary sees"] == "each upload, every round, cohorts of 10"


@pytest.mark.parametrize("unit", [(), ("--unit", "user", "--group-size", "8")])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--epsilon", "-1", "epsilon=-1.0: expected a finite number > 0"),
        ("--epsilon", "nan", "epsilon=nan: expected a finite number > 0"),
        ("--epsilon", "inf", "epsilon=inf: expected a finite number > 0"),
        ("--noise-multiplier", "1e300", "noise_multiplier=1e+300: expected a number from 1e-30"),
        ("--noise-multiplier", "1e-300", "noise_multiplier=1e-300: expected a number from 1e-30"),
    ],
)
def test_calibrate_refuses_a_number_that_no_run_can_have(unit, option, value, message):
    done = call("calibrate", *RUN, option, value, *unit)
    assert done.exit_code == 2
    assert message in unboxed(done.output)
