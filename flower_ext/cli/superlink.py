"""Run an app by Flower's commands, on a named SuperLink or on a SuperLink for this run only.

This module makes up for properties of plain ``flwr run``, which returns 0 for a failed run,
simulates two nodes regardless of the app, and by default installs the app's dependencies again.
"""

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flower_ext.cli.preparing import PreparedRun
from flower_ext.cli.processes import Followed, LaunchFailed, RunLog, end_groups, executable

HOST = "127.0.0.1"
_PATIENCE = 180
"""Seconds to wait for a SuperLink that does not answer, before the command gives up."""


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until Flower's SuperLink, which is ``process``, listens on a port of loopback."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((HOST, port), timeout=2):
            return
        time.sleep(0.1)
    last_lines = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise LaunchFailed(
        f"Flower's SuperLink did not start: nothing listens on port {port}; its exit status is "
        f"{process.poll()}\n{last_lines}"
    )


@contextmanager
def simulation_superlink(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a SuperLink for one simulation; yield the variables with which ``flwr`` finds it.

    ``flwr run`` starts a SuperLink that stays and that all simulations of a user share. This one
    has its own port, its own home below ``FLWR_HOME`` and no database, and ends with the block, so
    that no other run depends on it. Use it inside `reaper.reaped`, which ends Ray's processes.
    """
    base = Path(env.get("FLWR_HOME") or Path.home() / ".flwr").expanduser().absolute()
    base.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="simulation-", dir=base, ignore_cleanup_errors=True) as home:
        port, log = free_port(), Path(home, "superlink.log")
        Path(home, "config.toml").write_text(
            f'[superlink]\ndefault = "simulation"\n\n'
            f'[superlink.simulation]\naddress = "{HOST}:{port}"\ninsecure = true\n',
            encoding="utf-8",
        )
        env = {**env, "FLWR_HOME": home}
        words = [executable("flower-superlink"), "--insecure", "--simulation"]
        words += ["--isolation", "subprocess", "--host", HOST, "--port", str(port)]
        with log.open("wb") as stream:
            # A session of its own keeps the terminal's Ctrl-C away from the SuperLink, so that the
            # run ends before the SuperLink.
            process = subprocess.Popen(
                words, env=env, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            wait_for_port(port, process, log)
            yield env
        finally:
            end_groups([process])


def run_on_superlink(run: PreparedRun, env: Mapping[str, str], log: RunLog) -> None:
    """Run an app on the SuperLink that a connection of Flower's configuration names.

    If the options name no connection, the app runs on the SuperLink of `simulation_superlink`,
    which ends with this command. On any other SuperLink, an interruption of this command
    stops the run.
    """
    superlink, options = run.options.superlink, list[str]()
    flwr = _Flwr([] if superlink is None else [superlink], env)
    for key, value in run.changes.items():
        # TOML reads these values as JSON writes them, unless JSON escapes characters beyond U+FFFF.
        options += ["--run-config", f"{key}={json.dumps(value, ensure_ascii=False)}"]
    if superlink is None:
        federation = f"num-supernodes={run.nodes} client-resources-num-cpus=1"
        options += ["--federation-config", federation]
    try:
        run_id = str(flwr.answer("run", str(run.options.app), options=options)["run-id"])
    except KeyboardInterrupt:
        if superlink is None:
            raise
        raise LaunchFailed(
            "interrupted while Flower was starting the run: the run may have started and continue; "
            + flwr.how_to_stop("ID")
        ) from None
    try:
        outcome = flwr.follow(run_id, log)
    except KeyboardInterrupt:
        if superlink is not None:
            flwr.stop(run_id)
        raise
    status, details = outcome["status"], outcome["status-details"]
    if status == "finished:stopped":
        raise LaunchFailed(f"somebody stopped run {run_id}: {details}")
    if status != "finished:completed":
        raise LaunchFailed(f"run {run_id} ended as {status}: {details}")


@dataclass(frozen=True)
class _Flwr:
    """Flower's command ``flwr`` on one SuperLink; an empty ``connection`` means the default one."""

    connection: Sequence[str]
    env: Mapping[str, str]

    def answer(self, *words: str, options: Sequence[str] = ()) -> dict[str, Any]:
        """Run a command of ``flwr``, such as ``stop RUN_ID``; return the JSON that it prints.

        If the command fails, the error is `LaunchFailed`, with the command's message.
        """
        command = [*self._words(*words), *options, "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.env)
        try:  # if flwr fails early, it prints text despite --format
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise LaunchFailed(f"flwr {words[0]} failed: {done.stdout}{done.stderr}") from None
        if not answer.get("success"):
            raise LaunchFailed(f"flwr {words[0]} failed: {answer.get('error-message', answer)}")
        return answer

    def follow(self, run_id: str, log: RunLog) -> dict[str, Any]:
        """Show a run's log until the run has finished; return its entry in ``flwr list``."""
        program = Followed([*self._words("log", run_id), "--stream"], log, self.env)
        try:
            program.tell()
            program.wait()
        finally:
            program.process.kill()
        last_answer = time.monotonic()
        while True:
            try:
                (outcome,) = self.answer("list", options=["--run-id", run_id])["runs"]
            except LaunchFailed as error:
                # The ServerApp may still be running.
                if time.monotonic() - last_answer > _PATIENCE:
                    raise LaunchFailed(
                        f"the SuperLink has not answered for {_PATIENCE} s; run {run_id} may still "
                        "be running: look at its run directory, and run `flwr list` once the "
                        "SuperLink is back"
                    ) from error
            else:
                last_answer = time.monotonic()
                if str(outcome["status"]).startswith("finished"):
                    return dict(outcome)
            time.sleep(3)

    def stop(self, run_id: str) -> None:
        """Stop a run, because it would outlive this command and spend privacy budget."""
        try:
            self.answer("stop", run_id)
        except (LaunchFailed, KeyboardInterrupt) as error:
            raise LaunchFailed(
                f"interrupted, but run {run_id} could not be stopped: it may continue and spend "
                f"privacy budget; {self.how_to_stop(run_id)} ({error})"
            ) from None

    def how_to_stop(self, run_id: str) -> str:
        """Return a text with the commands by which a person stops a run."""
        where = "".join(f" {name}" for name in self.connection)
        return f"`flwr list{where}` shows it, `flwr stop {run_id}{where}` ends it"

    def _words(self, *words: str) -> list[str]:
        return [executable("flwr"), *words, *self.connection]
