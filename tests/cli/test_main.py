import ast
import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from itertools import product
from pathlib import Path

import pytest

import flower_ext
from flower_ext.cli import main, run_command
from flower_ext.cli.calibrate import noise_text
from flower_ext.cli.processes import LaunchFailed
from flower_ext.privacy import (
    Budget,
    CorrelatedNoise,
    DpSgd,
    NeighboringRelation,
    PrivacyUnit,
    epsilon_text,
    gaussian_loss,
)
from flower_ext.privacy.accounting.group_privacy import group_loss
from flower_ext.privacy.shared_ledger import Charge, charge, note_disclosure
from flower_ext.privacy.theorems.dp2_fedsam_theorem import (
    dp2_fedsam_theorem2,
    dp2_fedsam_theorem2_noise_multiplier,
)
from flower_ext.privacy.theorems.uldp_group_theorem import (
    group_loss_by_conversion,
    group_loss_by_renyi,
)
from flower_ext.runs import RunDirectory, RunWriter
from flower_ext.runs.directory import NotARun
from tests.support.commands import call
from tests.support.finished_runs import finished
from tests.support.grids import grid
from tests.support.imported_anew import run_anew

FACTS = ["--population", "100", "--sampling-rate", "0.1", "--rounds", "60"]


def unboxed(text: str) -> str:
    """Return a message without the box around it, which breaks its lines."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture(scope="module")
def calibrated():
    done = call("calibrate", *FACTS, "--epsilon", "2", "--json")
    assert done.exit_code == 0
    return json.loads(done.output)


@pytest.mark.full
def test_calibrate_gives_each_accounting_its_noise_and_none_overshoots(calibrated):
    facts = calibrated
    assert (facts["unit"], facts["delta"]) == ("client", 0.01)
    noise = {row["calibrated by"]: row["noise_multiplier"] for row in facts["rows"]}
    for row in facts["rows"]:
        given = ["--noise-multiplier", str(row["noise_multiplier"])]
        rows = json.loads(call("calibrate", *FACTS, *given, "--json").output)["rows"]
        (own,) = (r["epsilon"] for r in rows if r["calibrated by"] == row["calibrated by"])
        assert own == pytest.approx(2.0, rel=0.01)
        assert own <= 2.0 + 1e-9
        assert row["relation"]
        assert row["basis"] in ("published", "provable")
    assert noise["Poisson, PLD"] < noise["fixed size, RDP"]
    assert noise["fixed size, RDP"] < noise["cohorts known"]
    assert noise["Theorem 2 (DP²-FedSAM)"] == pytest.approx(3.4309, abs=1e-4)


def test_calibrate_in_words_names_the_conditions_that_fail():
    done = call("calibrate", *FACTS, "--epsilon", "2")
    assert done.exit_code == 0
    for word in ("1.1221", "one client of 100", "replace-one", "published", "not met", "2C"):
        assert word in done.output


def test_calibrate_turns_noise_into_epsilon():
    done = call(
        "calibrate", *FACTS[:2], "--cohort-size", "10", *FACTS[4:], "--noise-multiplier", "2"
    )
    assert done.exit_code == 0
    assert "σ = 2 · δ = 0.01 · T = 60 · r = 0.1" in done.output
    assert "Privacy loss" in done.output


@pytest.mark.parametrize(
    ("given", "told", "more"),
    grid(
        [
            (["--sampling-rate", "0.1"], "rounds", 1),
            (["--rounds", "60"], "sampling_rate", 0.01),
        ],
        lambda case: case[1] == "rounds",
    ),
)
def test_calibrate_turns_epsilon_and_noise_into_the_most_that_is_allowed(given, told, more):
    asked = ["--population", "100", "--noise-multiplier", "2", "--epsilon", "2", *given]
    found = json.loads(call("calibrate", *asked, "--json").output)
    stated = {name: found[name] for name in ("unit", "epsilon", "noise_multiplier", "delta")}
    assert stated == {"unit": "client", "epsilon": 2, "noise_multiplier": 2, "delta": 0.01}
    rows = found["rows"]
    assert all({"basis", "relation", "adversary sees"} <= set(row) for row in rows)
    by = {row["calibrated by"]: row[told] for row in rows}

    def epsilon(value):
        facts = {"--sampling-rate": "0.1", "--rounds": "60"}
        facts[f"--{told.replace('_', '-')}"] = str(value)
        words = [word for pair in facts.items() for word in pair]
        done = call("calibrate", "--population", "100", "--noise-multiplier", "2", *words, "--json")
        rows = json.loads(done.output)["rows"]
        return next(row["epsilon"] for row in rows if row["calibrated by"] == "Poisson, PLD")

    most = by["Poisson, PLD"]
    assert epsilon(most) <= 2 < epsilon(most + more)
    in_words = call("calibrate", *asked)
    assert in_words.exit_code == 0
    assert f"{most:.3g}"[:4] in in_words.output


OF_A_USER = ["--sampling-rate", "0.05", "--rounds", "50", "--delta", "1e-5", "--unit", "user"]


def test_calibrating_for_a_user_rounds_lemma_9_up_and_meets_the_target():
    facts = ["--population", "100", *OF_A_USER, "--group-size", "5"]
    answer = json.loads(call("calibrate", *facts, "--epsilon", "2", "--json").output)
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
        in call("calibrate", *facts, "--noise-multiplier", "9").output
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
    asked = ["--population", "100", "--sampling-rate", "0.01", "--noise-multiplier", "1e6"]
    told = call("calibrate", *asked, "--epsilon", "2").output
    assert "≥8388608" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*FACTS], "give three of --epsilon"),
        ([*FACTS, "--epsilon", "1", "--noise-multiplier", "1"], "give three of --epsilon"),
        ([*FACTS, "--cohort-size", "3", "--epsilon", "1"], "either --sampling-rate"),
        ([*FACTS, "--epsilon", "-1"], "epsilon=-1.0"),
        ([*FACTS, "--epsilon", "1", "--delta", "2"], "delta=2.0"),
        ([*FACTS, "--noise-multiplier", "0"], "noise_multiplier=0.0"),
        (["--population", "100", "--rounds", "1", "--sampling-rate", "7", "--epsilon", "1"], "7"),
    ],
)
def test_bad_options_exit_with_2_and_say_what_to_change(arguments, said):
    done = call("calibrate", *arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_report_rewrites_a_report_and_prints_where(tmp_path):
    run = finished(tmp_path / "run")
    done = call("report", str(run.path))
    assert done.exit_code == 0
    assert str(run.path / "report.html") in done.output
    assert (run.path / "report.html").exists()


def test_report_compares_several_runs(tmp_path):
    paths = [str(finished(tmp_path / name, method=name).path) for name in ("a", "b")]
    done = call("report", *paths, "--output", str(tmp_path / "both"))
    assert done.exit_code == 0
    assert (tmp_path / "both" / "comparison.html").exists()


def test_report_of_something_else_exits_with_2(tmp_path):
    done = call("report", str(tmp_path))
    assert done.exit_code == 2
    assert "expected the directory of a run" in done.output


@pytest.mark.parametrize(
    ("file", "rest"),
    grid(
        product(
            ["run.json", "guarantee.json", "metrics.jsonl", "missing.jsonl", "clients.csv"],
            ["", "[", "null", "{}", "[3]", '{"round', "\xff\n", '"a", 1\n2\n'],
        ),
        lambda case: case[1] == ("\xff\n" if case[0].endswith(".jsonl") else "{}"),
    ),
)
def test_a_report_of_a_damaged_run_names_the_file_in_one_line(tmp_path, file, rest):
    run = finished(tmp_path / "run")
    (run.path / file).write_bytes(f"{rest}\n".encode("latin-1"))
    done = call("report", str(run.path))
    assert done.exit_code in (0, 2), done.exception  # an empty file is valid for some commands
    if done.exit_code:
        assert f"{file} is damaged" in done.output
    assert done.exit_code == 2 or file != "run.json"


@pytest.mark.parametrize(("file", "renewed"), [("guarantee.json", True), ("metrics.jsonl", False)])
def test_a_damaged_file_that_a_resumed_run_renews_says_so(tmp_path, file, renewed):
    run = finished(tmp_path / "run")
    path = run.path / file
    path.write_bytes(path.read_bytes()[:-20] + b"\n")
    done = call("report", str(run.path))
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", "").split())
    assert "restore it from a copy" in said
    assert ("or resume the run, which writes it again" in said) == renewed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "nome=1"], "expected name=value"),
        (["--set", "rouns=1"], "did you mean rounds"),
        (["--set", "rounds=many"], "expected an integer"),
        (["--set", "seeded-noise=maybe"], "expected true or false"),
    ],
)
def test_run_refuses_unknown_settings_before_it_starts_anything(arguments, said):
    from tests.support.apps import DP2_FEDSAM

    done = call("run", str(DP2_FEDSAM.folder), *arguments)
    assert done.exit_code == 2
    assert said in unboxed(done.stderr)


def test_a_run_is_either_in_one_process_or_on_a_superlink():
    from tests.support.apps import DP2_FEDSAM

    done = call("run", str(DP2_FEDSAM.folder), "somewhere", "--in-process")
    assert done.exit_code == 2
    assert "has no SuperLink" in unboxed(done.stderr)


def test_workers_are_those_of_a_run_without_ray():
    from tests.support.apps import DP2_FEDSAM

    done = call("run", str(DP2_FEDSAM.folder), "--workers", "2")
    assert done.exit_code == 2
    assert "workers=2: Ray starts its own workers; add --in-process" in unboxed(done.stderr)


@pytest.mark.full
def test_run_takes_a_number_of_clients(tmp_path):
    from tests.support.apps import DP2_FEDSAM

    small = ["--set", "rounds=1", "--set", "partition=iid", "--runs", str(tmp_path)]
    done = call("run", str(DP2_FEDSAM.folder), "--in-process", "--clients", "7", *small)
    assert done.exit_code == 0, done.output
    (run,) = tmp_path.iterdir()
    assert RunDirectory.open(run).metadata["config"]["clients"] == 7


def test_runs_go_where_the_environment_says():
    assert "FLOWER_EXT_RUNS" in call("run", "--help").output


def test_a_run_goes_where_the_environment_says_unless_the_command_line_does(monkeypatch):
    asked = []
    monkeypatch.setattr(run_command, "prepare", lambda options: asked.append(str(options.runs)))
    monkeypatch.setattr(run_command, "launch", lambda run: None)
    monkeypatch.setenv("FLOWER_EXT_RUNS", "/there")
    call("run", "somewhere")
    call("run", "somewhere", "--runs", "/here")
    assert asked == ["/there", "/here"]


def test_the_version_is_that_of_the_package():
    done = call("--version")
    assert (done.exit_code, done.output) == (0, f"flower-ext {version('flower-ext')}\n")
    assert flower_ext.__version__ == version("flower-ext")
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = flower_ext.other


def test_apps_can_be_imported_while_the_installed_package_cannot_be_found():
    """As in Flower's simulation, where another thread takes an entry from `sys.path` meanwhile."""
    code = """
from importlib import metadata
found = metadata.version
def version(name):
    if name == "flower-ext":
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
import flower_ext.algorithms, flower_ext.federation, flower_ext.runs
"""
    done = run_anew(code)
    assert done.returncode == 0, done.stderr


def test_resuming_what_is_no_run_fails(tmp_path):
    from tests.support.apps import DP2_FEDSAM

    done = call("run", str(DP2_FEDSAM.folder), "--resume", str(tmp_path))
    assert done.exit_code == 2
    assert "holds no run.json" in unboxed(done.stderr)


def test_run_of_something_else_fails(tmp_path):
    done = call("run", str(tmp_path))
    assert done.exit_code == 2
    assert "no pyproject.toml" in unboxed(done.stderr)
    missing = call("run", str(tmp_path / "nowhere"))
    assert "there is no such folder" in unboxed(missing.stderr)


def test_messages_with_brackets_arrive_whole(monkeypatch):
    def fail(*args, **options):
        raise LaunchFailed("pip install 'flower-ext[vision]'")

    monkeypatch.setattr(run_command, "prepare", fail)
    assert "flower-ext[vision]" in call("run", "somewhere").stderr


def test_help_helps():
    for command in ([], ["run"], ["calibrate"], ["report"]):
        done = call(*command, "--help")
        assert done.exit_code == 0
    assert "Example" in call("calibrate", "--help").output


def test_report_of_a_ledger_that_was_changed_exits_with_1(tmp_path):
    run = finished(tmp_path / "run")
    ledger = run.ledger_path.read_text()
    run.ledger_path.write_text(ledger.replace('"round": 2', '"round": 9', 1))
    done = call("report", str(run.path))
    assert done.exit_code == 1
    assert "line 3 was changed" in done.output


def test_an_adversary_that_sees_uploads_is_accounted_without_amplification():
    rows = json.loads(call("calibrate", *FACTS, "--noise-multiplier", "3.4309", "--json").output)
    epsilon = {row["calibrated by"]: row["epsilon"] for row in rows["rows"]}
    assert epsilon["cohorts known"] == pytest.approx(7.122, abs=1e-3)
    assert epsilon["uploads known"] == pytest.approx(41.233, abs=1e-3)


def test_clients_in_turn_are_accounted_for_their_participations_and_the_matrix():
    """Of 60 rounds, each of 100 clients in cohorts of ten takes part in six, ten rounds apart."""
    rows = json.loads(call("calibrate", *FACTS, "--noise-multiplier", "3", "--json").output)["rows"]
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
    facts = ["--population", "100", "--rounds", "60", "--epsilon", "1"]
    done = call("calibrate", *facts, "--cohort-size", size)
    assert done.exit_code == 2
    assert "--cohort-size" in done.output


@pytest.mark.parametrize(
    "asked",
    [pytest.param(("--epsilon", "2"), marks=pytest.mark.full), ("--noise-multiplier", "1")],
)
def test_no_word_of_a_table_is_cut_off_on_a_narrow_terminal(monkeypatch, asked):
    monkeypatch.setenv("COLUMNS", "80")
    assert "…" not in call("calibrate", *FACTS, *asked).output


@pytest.mark.parametrize(("population", "rate", "rounds"), [(100, 0.1, 60), (200, 0.05, 100)])
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 1.7, 3.3, 5.0])
def test_a_printed_noise_meets_its_target(population, rate, rounds, epsilon):
    facts = {"sampling_rate": rate, "rounds": rounds, "delta": 1 / population}
    printed = float(noise_text(dp2_fedsam_theorem2_noise_multiplier(epsilon=epsilon, **facts)))
    assert dp2_fedsam_theorem2(noise_multiplier=printed, **facts).epsilon <= epsilon


@pytest.mark.parametrize(
    ("epsilon", "printed"),
    [
        (41.2329, "41.3"),
        (2.0000000000000004, "2"),
        (0.99951, "1"),
        (1082.99, "1.09e+03"),
        (0, "0.001"),
    ],
)
def test_calibrate_never_prints_less_than_an_epsilon(epsilon, printed):
    assert epsilon_text(epsilon) == printed


@pytest.mark.full
def test_the_cohort_that_uploads_are_accounted_for_is_named(calibrated):
    (row,) = (row for row in calibrated["rows"] if row["calibrated by"] == "uploads known")
    assert row["adversary sees"] == "each upload, every round, cohorts of 10"


def test_the_list_of_commands_is_shown_without_loading_any():
    code = (
        "import sys; from flower_ext.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print([*sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Run a Flower app, show its log" in done.stdout
    loaded = {name.partition(".")[0] for name in ast.literal_eval(done.stdout.splitlines()[-1])}
    assert not loaded & {"torch", "numpy", "flwr", "ray", "scipy", "matplotlib"}


def test_a_misspelt_command_is_answered_once_with_the_nearest():
    said = call("leger").output
    assert said.count("No such command") == said.count("Did you mean 'ledger'") == 1


@pytest.mark.parametrize("command", main.command_modules())
def test_every_parameter_of_a_command_has_a_help_text_that_is_shown(command):
    loaded = main._loaded(command, main.command_modules()[command])
    shown = " ".join(call(command, "--help").output.replace("│", " ").split())
    for parameter in loaded.params:
        text = getattr(parameter, "help", None)
        assert text, parameter.name
        assert " ".join(text.split())[:30] in shown, parameter.name


def test_what_a_terminal_cannot_show_ends_no_command():
    code = (
        "import sys; from pathlib import Path; from flower_ext.cli import main as cli; "
        "from flower_ext.runs.app_settings import checked_settings; "
        "checked_settings(Path('apps/uldp-fl'), []); "
        "sys.argv = ['x', 'calibrate', '--help']; cli.main()"
    )
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, **ascii_only},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert b"Target ?." in done.stdout


def test_a_place_that_cannot_be_is_said_in_one_line(tmp_path):
    (file := tmp_path / "a file").write_text("")
    run = finished(tmp_path / "run")
    compared = call("report", str(run.path), str(run.path), "--output", str(file))
    assert compared.exit_code == 1
    assert "a file" in compared.output.replace("\n", "")
    with pytest.raises(NotARun, match="cannot be made"):
        RunWriter.create(file / "run", {})


def test_an_app_whose_project_cannot_be_read_is_named(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.flwr")
    done = call("run", str(tmp_path))
    assert done.exit_code == 2
    assert "pyproject.toml is not valid TOML" in unboxed(done.output)


def test_ledger_shows_what_is_spent_what_is_left_and_what_lacks_epsilon(tmp_path):
    path = tmp_path / "people.jsonl"
    for name, epsilon in (("first", 0.5), ("second", 0.75)):
        new = Charge(
            run=name * 5,
            name=name,
            method="DPDitto",
            training=1,
            unit=PrivacyUnit.RECORD,
            relation=NeighboringRelation.REPLACE_ONE,
            epsilon=epsilon,
            delta=1e-5,
        )
        charge(path, new, Budget(epsilon=2.0, delta=1e-4))
    note_disclosure(path, run="p" * 20, method="DPDitto", what="a pilot without noise")
    done = call("ledger", str(path))
    assert done.exit_code == 0
    for part in (
        "first",
        "second",
        "0.5",
        "ε = 1.25 for one record under replace-one",
        "0.75 is left",
        "Not covered by any ε: a pilot without noise",
    ):
        assert part in " ".join(done.output.split())
    smaller = call("ledger", str(path), "--epsilon", "1").output
    assert "Of the budget of 1 against released models, 0 is left" in " ".join(smaller.split())
    assert "ε = inf" in call("ledger", str(path), "--delta", "1e-5").output


def test_ledger_refuses_a_broken_or_missing_account_or_that_of_a_run(tmp_path):
    own = tmp_path / "own.jsonl"
    run = finished(tmp_path / "run")
    own.write_bytes(run.ledger_path.read_bytes())
    (broken := tmp_path / "broken.jsonl").write_text("{}\n")
    for path, said, code in (
        (own, "of one run", 2),
        (broken, f"{broken}: line 1", 1),
        (tmp_path / "none.jsonl", "No such file", 1),
    ):
        done = call("ledger", str(path))
        assert done.exit_code == code
        assert said in done.stderr


@pytest.mark.parametrize(("command", "distribution"), main.PLUGINS.items())
def test_a_command_of_a_missing_plugin_names_the_package_to_install(
    command, distribution, monkeypatch
):
    monkeypatch.setenv("FLOWER_EXT_PLUGINS", "none")
    done = call(command, "--help")
    assert done.exit_code == 2
    assert f"'{command}' is a plug-in: pip install {distribution}" in unboxed(done.output)


@pytest.mark.parametrize("module", ["no_such_package.command", "flower_ext.no_such_module"])
def test_a_plugin_whose_module_is_gone_ends_no_command(module, monkeypatch):
    gone = EntryPoint("gone", f"{module}:gone", "flower_ext.commands")
    monkeypatch.setattr(main.plugins, "points", lambda group: (gone,))
    assert "gone" not in main.command_modules()
    assert "run" in main.command_modules()
