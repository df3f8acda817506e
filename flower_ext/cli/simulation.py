"""A SuperLink for one simulation, which starts and ends with it.

`flwr run` starts a SuperLink that stays and that all simulations of a user share. The SuperLink of
this module has its own port and home and no database, so no other run depends on it. The module
leaves all other SuperLinks alone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
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
    wait_for_port,
)

_CONNECTION = "simulation"


@contextmanager
def simulation_superlink(env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start a SuperLink for a simulation; yield the variables with which ``flwr`` finds it.

    At the end of the block, the function ends the SuperLink and all processes that it started.

    Parameters
    ----------
    env : Mapping[str, str]
        Variables of Flower's processes. The SuperLink's home is a folder below ``FLWR_HOME``.

    Raises
    ------
    ProcessFailed
        The SuperLink does not start.
    """
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
