"""The commands of flower-ext: what they accept, print and refuse."""

import ast
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, version
from itertools import product
from pathlib import Path

import pytest

import flower_ext
from flower_ext.cli import main, run_command
from flower_ext.cli.processes import LaunchFailed
from flower_ext.privacy import Budget, NeighboringRelation, PrivacyUnit
from flower_ext.privacy.shared_ledger import Charge, charge, note_disclosure
from flower_ext.runs import RunDirectory, RunWriter
from flower_ext.runs.directory import NotARun
from tests.support.commands import call, unboxed
from tests.support.finished_runs import finished
from tests.support.grids import grid
from tests.support.imported_anew import run_anew


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
    output = " ".join(done.output.replace("│", "").split())
    assert "restore it from a copy" in output
    assert ("or resume the run, which writes it again" in output) == renewed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "nome=1"], "expected name=value"),
        (["--set", "rouns=1"], "did you mean rounds"),
        (["--set", "rounds=many"], "expected an integer"),
        (["--set", "seeded-noise=maybe"], "expected true or false"),
    ],
)
def test_run_refuses_unknown_settings_before_it_starts_anything(arguments, message):
    from tests.support.apps import DP2_FEDSAM

    done = call("run", str(DP2_FEDSAM.folder), *arguments)
    assert done.exit_code == 2
    assert message in unboxed(done.stderr)


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
    requests = []
    monkeypatch.setattr(run_command, "prepare", lambda options: requests.append(str(options.runs)))
    monkeypatch.setattr(run_command, "launch", lambda run: None)
    monkeypatch.setenv("FLOWER_EXT_RUNS", "/there")
    call("run", "somewhere")
    call("run", "somewhere", "--runs", "/here")
    assert requests == ["/there", "/here"]


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
        raise LaunchFailed("pip install 'flower-ext[weighting]'")

    monkeypatch.setattr(run_command, "prepare", fail)
    assert "flower-ext[weighting]" in call("run", "somewhere").stderr


def test_help_helps():
    for command in ([], ["run"], ["ledger"], ["report"]):
        done = call(*command, "--help")
        assert done.exit_code == 0
    assert "Example" in call("ledger", "--help").output


def test_report_of_a_ledger_that_was_changed_exits_with_1(tmp_path):
    run = finished(tmp_path / "run")
    ledger = run.ledger_path.read_text()
    run.ledger_path.write_text(ledger.replace('"round": 2', '"round": 9', 1))
    done = call("report", str(run.path))
    assert done.exit_code == 1
    assert "line 3 was changed" in done.output


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
    output = call("leger").output
    assert output.count("No such command") == output.count("Did you mean 'ledger'") == 1


@pytest.mark.parametrize("command", main.command_modules())
def test_every_parameter_of_a_command_has_a_help_text_that_is_shown(command):
    loaded = main.load_command(command, main.command_modules()[command])
    shown = " ".join(call(command, "--help").output.replace("│", " ").split())
    for parameter in loaded.params:
        text = getattr(parameter, "help", None)
        assert text, parameter.name
        assert " ".join(text.split())[:30] in shown, parameter.name


def test_characters_that_a_terminal_lacks_end_no_command():
    code = (
        "import sys; from pathlib import Path; from flower_ext.cli import main as cli; "
        "from flower_ext.runs.app_settings import checked_settings; "
        "checked_settings(Path('apps/uldp-fl'), []); "
        "sys.argv = ['x', 'ledger', '--help']; cli.main()"
    )
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={**os.environ, **ascii_only},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert b"Budget ?;" in done.stdout


def test_an_impossible_output_folder_takes_one_line(tmp_path):
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
            population=10,
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
    run_ledger = tmp_path / "own.jsonl"
    run = finished(tmp_path / "run")
    run_ledger.write_bytes(run.ledger_path.read_bytes())
    (broken := tmp_path / "broken.jsonl").write_text("{}\n")
    for path, message, code in (
        (run_ledger, "of one run", 2),
        (broken, f"{broken}: line 1", 1),
        (tmp_path / "none.jsonl", "No such file", 1),
    ):
        done = call("ledger", str(path))
        assert done.exit_code == code
        assert message in done.stderr


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
