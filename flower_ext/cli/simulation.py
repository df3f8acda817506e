"""A SuperLink for one simulation: started for it, and ended with it.

`flwr run` starts one that stays, and that all simulations of a user share. This one has a port, a
home and no database of its own, so that no other run depends on it. Those that others have started
are left alone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from flower_ext.cli.processes import (
    HOST,
    ProcessFailed,
    end_tree,
    executable,
    free_port,
    hint_on_spaces,
    listens,
    wait_for_port,
)
from flower_ext.errors import InvalidValue

_CONNECTION = "simulation"
_PATIENCE = 15
"""Seconds that a Ray cluster has to answer."""


@contextmanager
def simulation_superlink(
    env: Mapping[str, str], *, ray: str | None = None
) -> Iterator[dict[str, str]]:
    """Start a SuperLink that simulates; yield the variables with which ``flwr`` finds it.

    Afterwards it is ended, with all that it started.

    Parameters
    ----------
    env : Mapping[str, str]
        Variables of Flower's processes. Its home is below their ``FLWR_HOME``.
    ray : str, optional
        Address ``host:port`` of a Ray cluster that runs the clients; by default Ray is started on
        this machine.

    Raises
    ------
    ProcessFailed
        No cluster answers at ``ray``, or the SuperLink does not start.
    """
    if ray is not None:
        check_cluster(ray)
    base = Path(env.get("FLWR_HOME") or Path.home() / ".flwr").expanduser().absolute()
    base.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="simulation-", dir=base, ignore_cleanup_errors=True) as home:
        port, log = free_port(), Path(home, "superlink.log")
        Path(home, "config.toml").write_text(
            f'[superlink]\ndefault = "{_CONNECTION}"\n\n'
            f'[superlink.{_CONNECTION}]\naddress = "{HOST}:{port}"\ninsecure = true\n',
            encoding="utf-8",
        )
        env = {**env, "FLWR_HOME": home}
        if ray is not None:
            env["RAY_ADDRESS"] = ray
        words = [executable("flower-superlink"), "--insecure", "--simulation"]
        words += ["--isolation", "subprocess", "--host", HOST, "--port", str(port)]
        with log.open("wb") as stream:
            # In a session of its own: Ctrl-C in a terminal ends the run first.
            process = subprocess.Popen(
                words, env=env, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            try:
                wait_for_port(port, process)
            except ProcessFailed as error:
                said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise ProcessFailed(
                    f"Flower's SuperLink did not start: {error}{hint_on_spaces()}\n{said}"
                ) from None
            yield env
        finally:
            end_tree(process)


def check_cluster(address: str) -> None:
    """Make sure that a Ray cluster answers; Flower would wait for it without a word.

    Raises
    ------
    InvalidValue
        The address is not ``host:port``.
    ProcessFailed
        No cluster answers there within seconds.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidValue(f"ray={address!r}: expected host:port, as `ray start --head` prints it")
    healthy = listens(host, int(port)) and _answers(address)
    if not healthy:
        raise ProcessFailed(
            f"no Ray cluster answers at {address}: start it with "
            f"`ray start --head --port={port}` on {host}, or see whether a firewall is between"
        )


def cluster_watch(address: str) -> Callable[[], None]:
    """Return a check to be called every few seconds while a run is on a Ray cluster.

    It raises `ProcessFailed` once the cluster was gone three times in a row, because Flower goes on
    waiting for it.
    """
    host, _, port = address.rpartition(":")
    missed = 0

    def check() -> None:
        nonlocal missed
        missed = 0 if listens(host, int(port)) else missed + 1
        if missed == 3:
            raise ProcessFailed(
                f"the Ray cluster at {address} no longer answers: start it again, and go on with "
                "the run by --resume"
            )

    return check


def _answers(address: str) -> bool:
    asked = [executable("ray"), "health-check", "--address", address]
    try:
        done = subprocess.run(asked, capture_output=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
