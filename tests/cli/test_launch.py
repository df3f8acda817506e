"""Starting apps: what is asked of Flower's commands, which are played here."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import pytest

from flower_ext.cli import launch as module
from flower_ext.cli.launch import LaunchFailed, launch
from flower_ext.runs import RunDirectory
from tests.support.apps import DP2_FEDSAM, FOREIGN, ULDP_FL


class Flower:
    """Plays ``flwr``; Ctrl-C is pressed while the command ``interrupted`` runs."""

    def __init__(self, interrupted: str, *, stops: bool = True) -> None:
        self.interrupted = interrupted
        self.stops = stops
        self.asked: list[list[str]] = []

    def command(self, arguments, env):
        self.asked.append([*arguments])
        if arguments[0] == self.interrupted:
            raise KeyboardInterrupt
        facts = {"status": "finished:stopped", "status-details": "N/A"}
        answer = {"success": arguments[0] == "run" or self.stops, "run-id": "7", "runs": [facts]}
        return CompletedProcess(arguments, 0, stdout=json.dumps(answer), stderr="")

    def log(self, command, **options):
        return self.command(command[1:], None)


def start(monkeypatch, flower: Flower, runs: Path, superlink: str | None = None):
    monkeypatch.setattr(module, "_flwr", flower.command)
    monkeypatch.setattr(module.subprocess, "run", flower.log)
    launch(DP2_FEDSAM.folder, runs=runs, superlink=superlink)


@pytest.mark.parametrize("superlink", [None, "far"])
def test_ctrl_c_stops_the_run(superlink, monkeypatch, tmp_path):
    flower = Flower("log")
    with pytest.raises(LaunchFailed, match="run 7 ended as finished:stopped: interrupted"):
        start(monkeypatch, flower, tmp_path, superlink)
    (stop,) = (asked for asked in flower.asked if asked[0] == "stop")
    assert stop[:3] == ["stop", "7", *([superlink] if superlink else ["--format"])]


def test_a_run_that_cannot_be_stopped_is_said_to_go_on(monkeypatch, tmp_path):
    with pytest.raises(LaunchFailed, match="run 7 could not be stopped: .* `flwr stop 7` ends it"):
        start(monkeypatch, Flower("log", stops=False), tmp_path)


def test_ctrl_c_before_the_run_has_a_number_says_how_to_stop_it(monkeypatch, tmp_path):
    with pytest.raises(LaunchFailed, match="`flwr list far` shows it, `flwr stop ID far` ends it"):
        start(monkeypatch, Flower("run"), tmp_path, "far")


@pytest.mark.parametrize("superlink", [None, "far"])
def test_a_refusal_below_a_path_with_spaces_says_that_flower_may_not_run_there(
    superlink, monkeypatch, tmp_path
):
    refused = json.dumps({"success": False, "error-message": "Internal server error."})
    monkeypatch.setattr(module, "_flwr", lambda words, env: CompletedProcess(words, 1, refused, ""))
    monkeypatch.setattr(module.sys, "prefix", "/home/a user/.venv")
    with pytest.raises(LaunchFailed, match="Internal server error") as failed:
        launch(DP2_FEDSAM.folder, runs=tmp_path, superlink=superlink)
    assert ("/home/a user/.venv" in str(failed.value)) == (superlink is None)


def test_flower_s_commands_print_what_the_locale_lacks_as_a_question_mark(monkeypatch):
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    command = [sys.executable, "-c", "print(chr(949))"]
    assert subprocess.check_output(command, env=module.environment()) == b"?\n"


def overrides(monkeypatch, **options):
    """The run configuration that ``flwr run`` is given, without the app's defaults."""
    flower = Flower("run")
    monkeypatch.setattr(module, "_flwr", flower.command)
    with pytest.raises(LaunchFailed, match="interrupted"):
        launch(DP2_FEDSAM.folder, **options)
    ((_, *words),) = flower.asked
    given = (words[i + 1] for i, word in enumerate(words) if word == "--run-config")
    return dict(setting.split("=", 1) for setting in given)


def test_any_folder_s_name_reaches_flower_as_it_is(monkeypatch, tmp_path):
    folder = tmp_path / "a b=c" / "σ 📁 it's"
    options = {"settings": ["data-folder=."], "runs": folder}
    given = overrides(monkeypatch, **options)["run-directory"]
    assert Path(tomllib.loads(f"path = {given}")["path"]).parent == folder


def test_a_number_of_clients_is_the_value_of_the_setting_that_the_app_has_for_it(
    monkeypatch, tmp_path
):
    given = []
    monkeypatch.setattr(
        module, "_exit_status", lambda _, config: given.append(json.loads(config)) or 0
    )
    for app in (DP2_FEDSAM, ULDP_FL):
        launch(app.folder, runs=tmp_path, clients=7)
    assert [(one.get("clients"), one.get("num-silos")) for one in given] == [(7, None), (None, 7)]


@pytest.mark.parametrize(
    ("cores", "clients", "nodes"), [(2, 50, 2), (16, 100, 10), (4, 7, 1), (8, 3, 3), (1, 9, 1)]
)
def test_a_simulation_has_no_more_nodes_than_cores_and_says_so(
    cores, clients, nodes, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module, "_cores", lambda: cores)
    config = overrides(monkeypatch, runs=tmp_path, settings=[f"clients={clients}"])
    assert int(config["clients-per-node"]) * nodes == clients
    assert f"Ray: {nodes} nodes with {clients // nodes} clients each" in capsys.readouterr().out


def test_the_nodes_of_a_superlink_and_of_those_who_say_so_are_one_client_each(
    monkeypatch, tmp_path
):
    far = overrides(monkeypatch, runs=tmp_path, superlink="far")
    assert "clients-per-node" not in far
    own = overrides(monkeypatch, runs=tmp_path, settings=["clients-per-node=1"])
    assert own["clients-per-node"] == "1"


def test_an_app_that_does_not_say_how_many_clients_it_has_takes_no_number(tmp_path):
    with pytest.raises(LaunchFailed, match="--clients=7: .* has no setting for how many .*add"):
        launch(FOREIGN.folder, runs=tmp_path, clients=7)


def test_clients_of_a_simulation_keep_their_memory_in_its_run_directory(monkeypatch, tmp_path):
    config = overrides(monkeypatch, runs=tmp_path)
    assert json.loads(config["state-folder"]) == f"{json.loads(config['run-directory'])}/state"


@pytest.mark.parametrize("folder", ["", "/elsewhere"])
def test_a_state_folder_that_was_set_stays(folder, monkeypatch, tmp_path):
    config = overrides(monkeypatch, runs=tmp_path, settings=[f"state-folder={folder}"])
    assert json.loads(config["state-folder"]) == folder


def test_supernodes_name_their_state_folders_themselves(monkeypatch, tmp_path):
    assert "state-folder" not in overrides(monkeypatch, runs=tmp_path, superlink="far")


class Engine:
    """Plays a run in one process that is interrupted, and ends after ``needs`` seconds."""

    def __init__(self, needs: float, *, again: bool = False) -> None:
        self.needs = needs
        self.again = again
        self.returncode: int | None = None

    def __call__(self, *command, **options):
        return self

    def communicate(self, config):
        raise KeyboardInterrupt

    def wait(self, timeout=None):
        if self.returncode is None and self.again:
            raise KeyboardInterrupt
        if self.returncode is None and timeout < self.needs:
            raise TimeoutExpired("engine", timeout)
        self.returncode = self.returncode or 1

    def kill(self):
        self.returncode = -9


def interrupted(monkeypatch, engine: Engine, path: Path) -> str:
    """What is said of a run in one process; its directory is there, and says that it goes on."""
    RunDirectory.create(path, {}).close()
    monkeypatch.setattr(module.subprocess, "Popen", engine)
    with pytest.raises(LaunchFailed) as said:
        launch(DP2_FEDSAM.folder, settings=[f"run-directory={path}"], in_process=True)
    return str(said.value)


def test_ctrl_c_leaves_a_run_in_one_process_the_time_to_write_its_end(monkeypatch, tmp_path):
    said = interrupted(monkeypatch, Engine(needs=20), tmp_path)
    assert said == "the run ended with the error above"
    assert RunDirectory.open(tmp_path).facts["status"] == "running"  # its own to change


@pytest.mark.parametrize("engine", [Engine(needs=1e6), Engine(needs=20, again=True)])
def test_a_run_in_one_process_that_had_to_be_killed_is_noted_as_failed(
    engine, monkeypatch, tmp_path
):
    assert interrupted(monkeypatch, engine, tmp_path) == "the run was ended by signal 9"
    facts = RunDirectory.open(tmp_path).facts
    assert (facts["status"], facts["reason"]) == ("failed", "the run was ended by signal 9")


PLACES = {"run-directory": "out", "data-folder": "~/data", "state-folder": "memory"}
GIVEN = [f"{name}={path}" for name, path in PLACES.items()]


@pytest.mark.parametrize("where", [{}, {"superlink": "near", "nodes": 4}])
def test_paths_mean_the_same_place_wherever_the_processes_of_this_machine_were_started(
    where, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    config = overrides(monkeypatch, settings=GIVEN, **where)
    expected = [tmp_path / "out", Path.home() / "data", tmp_path / "memory"]
    assert [json.loads(config[name]) for name in PLACES] == [str(path) for path in expected]


def test_a_folder_of_data_that_the_environment_names_is_found_from_everywhere(
    monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLOWER_EXT_DATA", "data")
    config = overrides(monkeypatch, superlink="near", nodes=4)
    assert json.loads(config["data-folder"]) == str(tmp_path / "data")


@pytest.mark.parametrize("name", ["run-directory", "state-folder"])
def test_a_superlink_elsewhere_is_sent_no_path_from_here(name):
    with pytest.raises(LaunchFailed, match=f"{name}='out': expected an absolute path"):
        launch(DP2_FEDSAM.folder, superlink="far", settings=[f"{name}=out"])


@pytest.mark.parametrize("path", ["/out", "~/out"])
def test_a_superlink_elsewhere_is_sent_its_own_paths_as_they_are(path, monkeypatch):
    settings = [f"run-directory={path}", "data-folder=data"]
    config = overrides(monkeypatch, superlink="far", settings=settings)
    assert json.loads(config["run-directory"]) == path
    assert json.loads(config["data-folder"]) == "data"


def test_a_run_that_was_moved_goes_on_with_the_memory_in_it(monkeypatch, tmp_path):
    first, moved = tmp_path / "first", tmp_path / "moved"
    kept = {"run-directory": str(first), "state-folder": str(first / "state")}
    RunDirectory.create(first, kept).close()
    first.rename(moved)
    config = overrides(monkeypatch, runs=tmp_path, resume=moved)
    assert json.loads(config["run-directory"]) == str(moved)
    assert json.loads(config["state-folder"]) == str(moved / "state")
