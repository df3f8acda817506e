"""A SuperLink for one simulation, which starts and ends with it.

`flwr run` starts a SuperLink that stays and that all simulations of a user share. The SuperLink of
this module has its own port and home and no database, so no other run depends on it. The module
leaves all other SuperLinks alone.
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
"""Seconds to wait for an answer of a Ray cluster."""


@contextmanager
def simulation_superlink(
    env: Mapping[str, str], *, ray: str | None = None
) -> Iterator[dict[str, str]]:
    """Start a SuperLink for a simulation; yield the variables with which ``flwr`` finds it.

    At the end of the block, the function ends the SuperLink and all processes that it started.

    Parameters
    ----------
    env : Mapping[str, str]
        Variables of Flower's processes. The SuperLink's home is a folder below ``FLWR_HOME``.
    ray : str, optional
        Address ``host:port`` of a Ray cluster that runs the clients; by default Flower starts Ray
        on this machine.

    Raises
    ------
    InvalidValue
        ``ray`` is not ``host:port``.
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
            # A session of its own keeps the terminal's Ctrl-C away, so that the run ends first.
            process = subprocess.Popen(
                words, env=env, stdout=stream, stderr=stream, start_new_session=True
            )
        try:
            try:
                wait_for_port(port, process)
            except ProcessFailed as error:
                last_lines = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise ProcessFailed(
                    f"Flower's SuperLink did not start: {error}{hint_on_spaces()}\n{last_lines}"
                ) from None
            yield env
        finally:
            end_tree(process)


def check_cluster(address: str) -> None:
    """Check that a Ray cluster answers, because Flower would wait for it in silence.

    Raises
    ------
    InvalidValue
        The address is not ``host:port``.
    ProcessFailed
        No cluster answers at that address within seconds.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidValue(f"ray={address!r}: expected host:port, as `ray start --head` prints it")
    healthy = listens(host, int(port)) and _answers(address)
    if not healthy:
        raise ProcessFailed(
            f"no Ray cluster answers at {address}: start it with "
            f"`ray start --head --port={port}` on {host}, or check for a firewall in between"
        )


def cluster_watch(address: str) -> Callable[[], None]:
    """Return a check to call every few seconds while a run is on a Ray cluster.

    The check raises `ProcessFailed` after the cluster failed to answer three times in a row,
    because Flower itself would wait for it forever.
    """
    host, _, port = address.rpartition(":")
    missed = 0

    def check() -> None:
        nonlocal missed
        missed = 0 if listens(host, int(port)) else missed + 1
        if missed == 3:
            raise ProcessFailed(
                f"the Ray cluster at {address} no longer answers: start it again, and continue the "
                "run by --resume"
            )

    return check


def _answers(address: str) -> bool:
    command = [executable("ray"), "health-check", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
