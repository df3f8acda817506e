"""Starting apps: what is asked of Flower's commands, which are played here."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from flower_ext.reporting import launch as module
from flower_ext.reporting.launch import LaunchFailed, launch
from tests.apps.app import DP2_FEDSAM


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
