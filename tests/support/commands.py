"""Run ``flower-ext`` as a separate process, with Flower's files in a folder of the test."""

import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.cli.processes import environment

SETTINGS = {
    "partition": "iid",
    "noise-multiplier": 5,
    "evaluate-every": 2,
    "clients": 2,
    "sampling": "everyone",
}
SETS = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
"""Arguments of a small run of apps/dp2-fedsam."""
FOREVER = [*SETS, "--set", "batch-size=128", "--set", "rounds=100000"]


class Command:
    """``flower-ext`` with Flower's files in a folder of the test."""

    def __init__(self, home: Path) -> None:
        self.home = home / "flwr"
        self.env = {
            **environment(),
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def start(self, *words: str, **streams) -> subprocess.Popen:
        program = ["flower_ext.cli.main", *words]
        if words[0] == "deploy":
            program = ["tests.support.deployment", *words[1:]]
        return subprocess.Popen(
            [sys.executable, "-m", *program],
            env=self.env,
            # A shell makes background processes ignore Ctrl-C; a terminal does not.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams},
        )

    def ended_by(self, number: signal.Signals, path: Path, *words: str) -> tuple[int, str, str]:
        """Return (exit status, output, errors) of a run that a signal ends after some rounds."""
        with (
            (self.home.parent / "out").open("w+b") as out,
            (self.home.parent / "err").open("w+b") as err,
        ):
            process = self.start(*words, stdout=out, stderr=err)
            while not (path / "guarantee.json").exists():
                assert process.poll() is None, (self.home.parent / "err").read_text()
                time.sleep(0.1)
            process.send_signal(number)
            status = process.wait(180)
            texts = [(self.home.parent / name).read_text() for name in ("out", "err")]
        return status, *texts

    def left(self) -> list[str]:
        """Return the test's processes, if some still run after 20 seconds.

        They have its folder in their environment. Ray's workers end a moment after the command.
        """
        end = time.monotonic() + 20
        while (running := self._running()) and time.monotonic() < end:
            time.sleep(0.2)
        return running

    def _running(self) -> list[str]:
        running = []
        for process in psutil.process_iter():
            try:
                if str(self.home) in process.environ().get("FLWR_HOME", ""):
                    running.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return running


def call(*arguments: str):
    """Run ``flower-ext`` with arguments in this process; return Click's result."""
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


def unboxed(text: str) -> str:
    """Return a message without the box around it, which breaks its lines."""
    return " ".join(text.replace("│", " ").split())
