"""DP-Ditto's rounds and global weight from a settings file, by both bounds."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.runs.settings import declarations
from flower_ext_planner.ditto_schedule import ScheduleSettings
from tests.support.apps import APPS

EXAMPLE = APPS / "dp-ditto" / "schedule.toml"
SETTINGS = {
    "epsilon": 10,
    "delta": 1e-4,
    "num-clients": 20,
    "num-examples": 600,
    "clipping-norm": 10,
    "learning-rate": 0.05,
    "dimension": 10,
    "strong-convexity": 1,
    "smoothness": 2,
    "initial-gap": 5,
    "initial-distance": 40,
    "gradient-bound": 1,
    "model-spread": 1,
    "gradient-clipping-norm": 1,
    "max-rounds": 400,
}
LINEAR = {"feature-energy": 600, "label-variance": 40, "model-variance": 0.1}


def schedule(folder: Path, *options: str, **changes: object):
    """Call the command with `SETTINGS` and changes, None to leave one out."""
    changes = {name.replace("_", "-"): value for name, value in changes.items()}
    settings = {**SETTINGS, **changes}
    lines = (f"{name} = {json.dumps(v)}\n" for name, v in settings.items() if v is not None)
    (folder / "schedule.toml").write_text("".join(lines))
    words = ["ditto-schedule", str(folder / "schedule.toml"), *options]
    return CliRunner().invoke(app, words, env={"COLUMNS": "200"})


def answered(folder: Path, **changes: object) -> dict:
    done = schedule(folder, "--json", **changes)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_rounds_and_weight_are_answered_for_both_bases(tmp_path):
    answer = answered(tmp_path, **LINEAR)
    assert (answer["unit"], answer["relation"]) == ("record", "replace-one")
    by_basis = {one["basis"]: one for one in answer["schedules"]}
    assert set(by_basis) == {"published", "provable"}
    for one in by_basis.values():
        assert 1 <= one["rounds"] <= 400
        assert 0 < one["global_weight"] < 2
        assert one["epsilon"]["worst case"] > one["epsilon"]["as published"]
    assert by_basis["published"]["epsilon"]["as published"] == pytest.approx(10)
    spent = by_basis["provable"]["epsilon"]["gradients clipped"]
    assert 10 * (1 - 1e-6) < spent <= 10


def test_a_schedule_for_a_given_weight_states_what_holds(tmp_path):
    done = schedule(tmp_path, global_weight=0.1, strong_convexity=0.5, delta=0.01)
    assert done.exit_code == 0, done.output
    for word in ("T*", "one record of 600", "published", "provable", "✗", "μ >", "δ = 0.01"):
        assert word in done.output


@pytest.mark.parametrize("delta", [None, 0.01])
def test_the_command_warns_of_a_large_delta_but_never_of_its_default(tmp_path, delta):
    done = schedule(tmp_path, global_weight=0.1, num_examples=49, delta=delta)
    assert done.exit_code == 0, done.output
    assert ("is large beside" in done.output) == (delta is not None)


@pytest.mark.filterwarnings("error")
def test_an_infinite_bound_leaves_a_schedule_without_rounds_in_valid_json(tmp_path):
    changes = {"strong_convexity": 0.05, "learning_rate": 0.1, "max_rounds": 20000}
    done = schedule(tmp_path, "--json", global_weight=0.1, **changes)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    answer = json.loads(done.output, parse_constant=refuse)
    assert answer["schedules"][0]["rounds"] == 0
    assert answer["schedules"][1]["bound"] > 0


def test_without_gradient_bounds_only_the_provable_schedule_is_made(tmp_path):
    answer = answered(tmp_path, global_weight=0.5, gradient_bound=None)
    assert [one["basis"] for one in answer["schedules"]] == ["provable"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_bound": None}, "needs gradient-bound as well"),
        (
            {"gradient_bound": None, "model_spread": None},
            "needs gradient-bound, model-spread as well",
        ),
    ],
)
def test_a_published_schedule_that_is_missing_says_what_it_needs(given, message, tmp_path):
    assert message in schedule(tmp_path, global_weight=0.5, **given).output
    assert "No published schedule" not in schedule(tmp_path, global_weight=0.5).output


def test_without_clipped_gradients_the_provable_noise_is_that_of_2C(tmp_path):
    answer = answered(tmp_path, global_weight=0.5, gradient_clipping_norm=None)
    provable = answer["schedules"][1]
    assert provable["epsilon"]["worst case"] == pytest.approx(10)
    assert "gradients clipped" not in provable["epsilon"]


def test_several_local_steps_raise_the_noise_and_lie_beyond_the_bound(tmp_path):
    one, three = (
        answered(tmp_path, global_weight=0.5, local_steps=k)["schedules"][1] for k in (1, 3)
    )
    per_round = [p["noise_stddev"] / p["rounds"] ** 0.5 for p in (one, three)]
    assert per_round[1] == pytest.approx(3 * per_round[0])
    assert one["conditions_not_met"] == []
    assert "K = 3" in three["conditions_not_met"][0]


@pytest.mark.parametrize("value", [1e-320, 1e-31, 1e31, 1e300, 10**400, 10**16])
@pytest.mark.parametrize("given", [{"global-weight": 1}, LINEAR])
def test_absurd_numbers_are_refused_or_give_a_schedule_but_never_overflow(tmp_path, given, value):
    for name in (SETTINGS | given).keys() - {"global-weight", "max-rounds", "delta"}:
        done = schedule(tmp_path, "--json", **{**given, name: value})
        assert done.exit_code in (0, 2), (name, done.exception)
        assert done.exit_code or json.loads(done.output)["schedules"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "give either global-weight or all of feature-energy"),
        ({"global_weight": 1, "feature_energy": 1}, "give either global-weight"),
        ({"global_weight": 1, **LINEAR}, "give either global-weight"),
        ({"feature_energy": 1}, "give either global-weight"),
        ({"global_weight": 2.5}, "global_weight=2.5: expected λ, a number in [0, 2]"),
        ({"global_weight": -0.1}, "global_weight=-0.1"),
        ({"global_weight": 1, "epsilon": 0}, "epsilon=0: expected a finite number > 0"),
        ({"global_weight": 1, "epsilon": "ten"}, "epsilon='ten': expected a finite number > 0"),
        ({"global_weight": 1, "epsilon": None}, "schedule has no epsilon: expected a finite"),
        ({"global_weight": 1, "epsilom": 1}, "epsilom: no such setting; did you mean epsilon"),
        ({"global_weight": 1, "delta": 1}, "delta=1: expected"),
        ({"global_weight": 1, "max_rounds": 0}, "max-rounds=0: expected an integer >= 1"),
        ({"global_weight": 1, "num_examples": [1]}, "num-examples=[1]: expected an integer"),
        ({"global_weight": 1, "smoothness": 0.5}, "smoothness=0.5"),
        ({"global_weight": 1, "smoothness": None}, "schedule has no smoothness: expected"),
        ({"global_weight": 1, "learning_rate": 1}, "learning_rate=1.0: expected"),
        ({"global_weight": 1, "personal_learning_rate": 0}, "personal-learning-rate=0"),
        (
            {"global_weight": 1, "gradient_clipping_norm": None, "local_steps": 2},
            "local-steps need gradient-clipping-norm",
        ),
    ],
)
def test_an_impossible_schedule_exits_with_2_and_says_what_to_change(tmp_path, changes, message):
    done = schedule(tmp_path, **changes)
    assert done.exit_code == 2
    assert _unbroken(message) in _unbroken(done.output)


def _unbroken(text):
    """Leave out spaces and the box around an error, which breaks lines and long words."""
    return "".join(text.replace("│", " ").split())


def test_a_file_that_is_no_settings_file_is_refused_by_name(tmp_path):
    for name, text, message in (
        ("no.toml", None, "No such file"),
        ("bad.toml", "x", "not valid TOML"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        done = CliRunner().invoke(app, ["ditto-schedule", str(tmp_path / name)])
        assert done.exit_code == 2
        for words in (name, message):
            assert _unbroken(words) in _unbroken(done.output)


def test_the_example_beside_the_app_has_a_schedule_of_both_bases():
    words = ["ditto-schedule", str(EXAMPLE), "--json"]
    schedules = json.loads(CliRunner().invoke(app, words).output)["schedules"]
    assert [one["basis"] for one in schedules] == ["published", "provable"]
    assert all(one["rounds"] > 0 for one in schedules)


def test_the_example_names_every_setting_that_there_is():
    text = EXAMPLE.read_text()
    names = {each.name for each in declarations(ScheduleSettings).values()}
    assert [name for name in names if f"\n{name} =" not in text and f"# {name} =" not in text] == []
