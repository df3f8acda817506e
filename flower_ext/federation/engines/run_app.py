"""Run an app in this process, or with its clients shared among several worker processes.

The command line names the app's folder and the numbers of workers and clients; standard input holds
the whole run configuration, as JSON. People use ``flower-ext run FOLDER --in-process``, which fills
in the app's defaults.
"""

import errno
import json
import signal
import sys
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType

from flwr.app import UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_ext.errors import FlowerExtError
from flower_ext.federation.engines.in_process import InProcessGrid, run_in_process
from flower_ext.files import read_toml

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers for a full disk, an exhausted quota and a file that is too large."""


def load_app(folder: Path) -> tuple[ServerApp, ClientApp]:
    """Return the ServerApp and the ClientApp that a folder's ``pyproject.toml`` names."""
    project = read_toml(folder / "pyproject.toml")
    names = project["tool"]["flwr"]["app"]["components"]
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return resolve_name(names["serverapp"]), resolve_name(names["clientapp"])


def run_app(folder: Path, config: UserConfig, *, clients: int, workers: int = 1) -> InProcessGrid:
    """Run the app of a folder with ``clients`` clients."""
    server, client = load_app(folder.absolute())
    return run_in_process(server, client, num_clients=clients, run_config=config, workers=workers)


def main() -> None:
    """Run the app that the command line names; for an error that users can fix, print one line.

    SIGTERM ends the run cleanly, with the exit status 143.
    """
    former = signal.signal(signal.SIGTERM, _interrupt)
    try:
        workers, clients = int(sys.argv[2]), int(sys.argv[3])
        run_app(Path(sys.argv[1]), json.load(sys.stdin), clients=clients, workers=workers)
    except KeyboardInterrupt as end:
        if end.args:
            sys.exit(128 + signal.SIGTERM)
        sys.exit("Error: interrupted")
    except FlowerExtError as error:
        sys.exit(f"Error: {error}")
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        where = f" of {error.filename}" if error.filename else ""
        sys.exit(f"Error: the disk{where} is full ({error.strerror}): free some space, then resume")
    finally:
        signal.signal(signal.SIGTERM, former)


def _interrupt(number: int, _: FrameType | None) -> None:
    """End the run; ignore further such signals, because they would disturb its last writes."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


if __name__ == "__main__":
    main()
