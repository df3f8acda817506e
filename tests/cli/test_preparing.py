"""Settings and options of a run before it starts; test_ending.py runs the processes."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli import launching, main, run_command
from flower_ext.cli import preparing as module
from flower_ext.cli.preparing import RunOptions
from flower_ext.cli.processes import environment
from flower_ext.errors import InvalidValue
from flower_ext.runs import RunWriter
from tests.support.apps import DP2_FEDSAM, FOREIGN, ULDP_FL


def test_flower_s_commands_print_what_the_locale_lacks_as_a_question_mark(monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    command = [sys.executable, "-c", "print(chr(949))"]
    assert subprocess.check_output(command, env=environment()) == b"?\n"


@pytest.mark.parametrize("file", ["preset", "settings_file"])
@pytest.mark.parametrize("place", [{"in_process": True, "workers": 3}, {"superlink": "far"}, {}])
def test_the_command_that_continues_an_interrupted_run_is_accepted(monkeypatch, file, place):
    """A resumed run refuses a preset, so the command must not repeat the one of the first start."""
    given = {"app": Path("app"), "settings": ["rounds=9"], file: Path("one"), **place}
    again = []
    monkeypatch.setattr(run_command, "prepare", lambda options: again.append(options))
    monkeypatch.setattr(run_command, "launch", lambda run: None)
    _, *words = launching.command_to_resume(RunOptions(**given), "out")
    assert CliRunner().invoke(main.app, words).exit_code == 0
    (options,) = again
    kept = {name: getattr(options, name) for name in ("app", "in_process", "workers", "superlink")}
    assert RunOptions(**kept) == RunOptions(app=Path("app"), **place)
    if "superlink" in place:
        assert options.settings == ["rounds=9", "run-directory=out", "resume=true"]
        assert str(getattr(options, file)) == "one"
    else:
        assert (options.settings, options.resume) == (["rounds=9"], Path("out"))


def prepared(app, **options):
    return module.prepare(RunOptions(app=app, **options))


def overrides(**options):
    """Return the overrides in the run configuration that ``flwr run`` receives."""
    changes = prepared(DP2_FEDSAM.folder, **options).changes
    return {name: json.dumps(value, ensure_ascii=False) for name, value in changes.items()}


@pytest.mark.parametrize("plugin", ["flower-ext[weighting]", "flower-ext-check>=0.1"])
def test_an_app_may_depend_on_this_package_and_on_installed_plugins(plugin, tmp_path):
    (tmp_path / "pyproject.toml").write_text(f'[project]\ndependencies = ["flwr", "{plugin}"]\n')
    assert prepared(tmp_path, clients=2)


@pytest.mark.parametrize(
    ("dependency", "advice"),
    [
        ("flower-ext-no", "pip install flower-ext-no, or ./plugins/no in"),
        ("flower-ext-no[all]>=0.1", "pip install 'flower-ext-no[all]', or './plugins/no[all]' in"),
    ],
)
def test_an_app_whose_plugin_is_not_installed_says_what_to_install(dependency, advice, tmp_path):
    (tmp_path / "pyproject.toml").write_text(f'[project]\ndependencies = ["{dependency}"]\n')
    with pytest.raises(InvalidValue, match=re.escape(advice)):
        prepared(tmp_path, clients=2)
    assert prepared(tmp_path, superlink="far")  # whose machines have other packages


def test_any_folder_s_name_reaches_flower_as_it_is(tmp_path):
    folder = tmp_path / "a b=c" / "σ 📁 it's"
    options = {"settings": ["data-folder=."], "runs": folder}
    given = overrides(**options)["run-directory"]
    assert Path(tomllib.loads(f"path = {given}")["path"]).parent == folder


def test_a_number_of_clients_sets_the_apps_setting_for_it(tmp_path):
    folders = (DP2_FEDSAM.folder, ULDP_FL.folder)
    given = [prepared(each, runs=tmp_path, clients=7, in_process=True).config for each in folders]
    assert [(one.get("clients"), one.get("num-silos")) for one in given] == [(7, None), (None, 7)]


@pytest.mark.parametrize(
    ("cores", "clients", "nodes"), [(2, 50, 2), (16, 100, 10), (4, 7, 1), (8, 3, 3), (1, 9, 1)]
)
def test_a_simulation_has_no_more_nodes_than_cores_and_says_so(
    cores, clients, nodes, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(cores), raising=False)
    config = overrides(runs=tmp_path, settings=[f"clients={clients}"])
    assert int(config["clients-per-node"]) * nodes == clients
    assert f"Ray: {nodes} nodes with {clients // nodes} clients each" in capsys.readouterr().out


def test_nodes_of_a_superlink_are_one_client_each(tmp_path):
    far = overrides(runs=tmp_path, superlink="far")
    assert "clients-per-node" not in far
    changed = overrides(runs=tmp_path, settings=["clients-per-node=1"])
    assert changed["clients-per-node"] == "1"


def test_clients_of_a_simulation_keep_their_memory_in_its_run_directory(tmp_path):
    config = overrides(runs=tmp_path)
    assert json.loads(config["state-folder"]) == f"{json.loads(config['run-directory'])}/state"


@pytest.mark.parametrize("folder", ["", "/elsewhere"])
def test_a_state_folder_that_was_set_stays(folder, tmp_path):
    config = overrides(runs=tmp_path, settings=[f"state-folder={folder}"])
    assert json.loads(config["state-folder"]) == folder


def test_supernodes_name_their_state_folders_themselves(tmp_path):
    assert "state-folder" not in overrides(runs=tmp_path, superlink="far")


PLACES = {"run-directory": "out", "data-folder": "~/data", "state-folder": "memory"}
GIVEN = [f"{name}={path}" for name, path in PLACES.items()]


def test_paths_mean_the_same_place_wherever_local_processes_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = overrides(settings=GIVEN)
    expected = [tmp_path / "out", Path.home() / "data", tmp_path / "memory"]
    assert [json.loads(config[name]) for name in PLACES] == [str(path) for path in expected]


def test_a_folder_of_data_that_the_environment_names_is_found_from_everywhere(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWER_EXT_DATA", "data")
    config = overrides()
    assert json.loads(config["data-folder"]) == str(tmp_path / "data")


@pytest.mark.parametrize("name", ["run-directory", "state-folder"])
def test_a_superlink_elsewhere_is_sent_no_path_from_here(name):
    with pytest.raises(InvalidValue, match=f"{name}='out': expected an absolute path"):
        prepared(DP2_FEDSAM.folder, superlink="far", settings=[f"{name}=out"])


@pytest.mark.parametrize("path", ["/out", "~/out"])
def test_a_remote_superlink_gets_its_paths_unchanged(path):
    settings = [f"run-directory={path}", "data-folder=data"]
    config = overrides(superlink="far", settings=settings)
    assert json.loads(config["run-directory"]) == path
    assert json.loads(config["data-folder"]) == "data"


def test_a_moved_run_resumes_with_the_memory_in_it(tmp_path):
    first, moved = tmp_path / "first", tmp_path / "moved"
    kept = {"run-directory": str(first), "state-folder": str(first / "state")}
    RunWriter.create(first, kept).close()
    first.rename(moved)
    config = overrides(runs=tmp_path, resume=moved)
    assert json.loads(config["run-directory"]) == str(moved)
    assert json.loads(config["state-folder"]) == str(moved / "state")


def test_a_remote_superlink_gets_only_the_callers_named_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWER_EXT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("FLOWER_EXT_RUNS", str(tmp_path / "runs"))
    run = prepared(DP2_FEDSAM.folder, superlink="far")
    assert (run.changes, run.path) == ({}, None)
    assert str(tmp_path) not in json.dumps(dict(run.config))
    named = prepared(DP2_FEDSAM.folder, superlink="far", runs=Path("/srv/runs"))
    assert named.path is not None
    assert named.path.parent == Path("/srv/runs")


def test_a_relative_folder_for_the_runs_of_a_superlink_elsewhere_is_refused():
    with pytest.raises(InvalidValue, match="expected an absolute path"):
        prepared(DP2_FEDSAM.folder, superlink="far", runs=Path("mine"))


def test_a_simulation_without_a_number_of_clients_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(InvalidValue, match=r"add clients = N to \[tool.flwr.*--clients=N"):
        prepared(FOREIGN.folder, runs=tmp_path)
    for engine in ({}, {"in_process": True}):
        assert prepared(FOREIGN.folder, runs=tmp_path, clients=7, **engine).nodes == 7
