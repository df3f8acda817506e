"""A deployment on this machine: a SuperLink, SuperNodes, TLS and keys, all real processes.

    python -m tests.support.deployment apps/dp2-fedsam --nodes 4 --set rounds=3

runs an app on it, as `make deploy` does. Options that are not of this program are those of
``flower-ext run``.

A deployment has the parts of a federation of several machines, on loopback and in one folder:
``certificates/`` (a certificate authority and the SuperLink's certificate), ``keys/`` (one pair
for each node, and the secret of the SuperExec), ``superlink.db``, ``logs/`` and Flower's home.
Nodes can be killed, frozen and started again, and so can the SuperLink. The ServerApp survives a
restart of the SuperLink because it runs under a separate SuperExec (``--isolation process``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_bytes
from tempfile import TemporaryDirectory
from typing import Any

import trustme
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from flower_ext.cli import main as command_line
from flower_ext.cli.processes import (
    LaunchFailed,
    end_groups,
    environment,
    executable,
    signals_as_interrupts,
)
from flower_ext.cli.reaper import reaped
from flower_ext.cli.superlink import HOST, free_port, wait_for_port
from flower_ext.data import FOLDER_VARIABLE
from flower_ext.files import write_whole
from flower_ext.runs.directory import RUNS_VARIABLE, new_run_path

CONNECTION = "loopback"
"""Name of the deployment in Flower's configuration: ``flwr run APP loopback``."""


@dataclass
class Deployment:
    """A SuperLink and its SuperNodes; use it in a ``with`` statement, which starts and ends them.

    Parameters
    ----------
    folder : Path
        Folder for all files of the deployment, created if it does not exist. A folder of an
        earlier deployment keeps its database, keys and registrations.
    nodes : int
        Number of SuperNodes. Node i of 0 … nodes−1 has ``partition-id`` i in its node config.
    node_config : Mapping[str, str | int | float | bool]
        Further values for the node config of all nodes; ``{node}`` in a text is the node's number.
    policies : Mapping[int, Path]
        Policy of the guard of each node that has one. The guard starts and ends with the node.
    """

    folder: Path
    nodes: int
    node_config: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    policies: Mapping[int, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Processes of the deployment start in this folder, where a relative path means another.
        self.folder = Path(self.folder).absolute()
        self.home = self.folder / "flwr"
        self.port = free_port()
        self.env = {
            **environment(),
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        if data := os.environ.get(FOLDER_VARIABLE):
            self.env[FOLDER_VARIABLE] = str(Path(data).expanduser().absolute())
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: dict[int, subprocess.Popen[bytes]] = {}
        self.guards: dict[int, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Deployment:
        try:
            self.prepare()
            self.start_superlink()
            self.start_superexec()
            for node in range(self.nodes):
                self.register(node)
                self.start_node(node)
            self.wait_for_nodes(self.nodes)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def prepare(self) -> None:
        """Create folders, certificates, and the connection in Flower's configuration."""
        for part in (self.folder, self.home, self.folder / "logs", self.folder / "keys"):
            part.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_certificates(self._certificates)
        root = json.dumps(str(self._certificates / "ca.crt"), ensure_ascii=False)
        if not self._secret.exists():
            write_whole(self._secret, token_bytes(32))
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "{HOST}:{self.port}"\n'
            f"root-certificates = {root}\n",
            encoding="utf-8",
        )

    def start_superlink(self) -> None:
        """Start the SuperLink on its existing or a new database, and wait for its port.

        Raises
        ------
        LaunchFailed
            Nothing listens on its port after a minute.
        """
        words = ["flower-superlink", "--host", HOST, "--port", str(self.port)]
        words += ["--database", str(self.folder / "superlink.db")]
        words += ["--disable-runtime-dependency-installation", "--isolation", "process"]
        words += ["--superexec-auth-secret-file", str(self._secret), "--enable-supernode-auth"]
        words += self._certified
        self.superlink = self._start("superlink", *words)
        wait_for_port(self.port, self.superlink, self.folder / "logs" / "superlink.log")

    def start_superexec(self) -> None:
        """Start the SuperExec, which runs ServerApps; they survive a restart of the SuperLink."""
        words = ["flower-superexec", "--runtime-api-address", f"{HOST}:{self.port}"]
        words += ["--superexec-auth-secret-file", str(self._secret), *self._trust]
        self._start("superexec", *words)

    def start_node(
        self,
        node: int,
        *,
        config: Mapping[str, str | int | float | bool] | None = None,
        name: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start SuperNode ``node`` with its key; ``config`` overrides values of its node config."""
        name = name or f"node-{node}"
        values: dict[str, Any] = {"partition-id": node, "num-partitions": self.nodes}
        shared = self.node_config.items()
        values |= {n: v.format(node=node) if isinstance(v, str) else v for n, v in shared}
        values |= config or {}
        words = ["flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        words += ["--host", HOST, "--port", str(port := free_port())]
        words += ["--node-config", " ".join(f"{n}={json.dumps(v)}" for n, v in values.items())]
        private, _ = make_key(self.folder / "keys", name)
        words += [*self._trust, "--auth-supernode-private-key", str(private)]
        if node in self.policies:
            words += ["--isolation", "process", "--superexec-auth-secret-file", str(self._secret)]
            words += self._certified
        process = self._start(name, *words)
        if node in self.policies:
            self.guards[node] = self.start_guard(node, port)
        if name == f"node-{node}":
            self.supernodes[node] = process
        return process

    def start_guard(self, node: int, port: int) -> subprocess.Popen[bytes]:
        """Start the guard of a node whose Runtime API listens on ``port``."""
        words = ["flower-ext", "guard", str(self.policies[node])]
        words += ["--superexec-auth-secret-file", str(self._secret)]
        words += ["--runtime-api-address", f"{HOST}:{port}", *self._trust]
        return self._start(f"guard-{node}", *words)

    def stop(self) -> None:
        """End every process of the deployment, the newest first: SIGTERM, after 20 s SIGKILL."""
        end_groups(reversed(self._started))
        self._started.clear()

    def register(self, node: int) -> None:
        """Register a node's public key with the SuperLink; accept one that is registered already.

        Raises
        ------
        LaunchFailed
            The SuperLink refused the key.
        """
        _, public = make_key(self.folder / "keys", f"node-{node}")
        done = self.flwr("supernode", "register", str(public), CONNECTION)
        if done.returncode and "already" not in done.stdout + done.stderr:
            raise LaunchFailed(f"node {node} was not registered: {done.stdout}{done.stderr}")

    def online(self) -> int:
        """Return the number of nodes that the SuperLink counts as connected."""
        answer = json.loads(self.flwr("supernode", "list", CONNECTION, "--format", "json").stdout)
        return sum(node["status"] == "online" for node in answer["nodes"])

    def wait_for_nodes(self, count: int, *, seconds: float = 90) -> None:
        """Wait until ``count`` nodes are connected; look once a second.

        Raises
        ------
        LaunchFailed
            Fewer are connected after ``seconds``; the message ends with the logs.
        """
        deadline = time.monotonic() + seconds
        while self.online() < count:
            if time.monotonic() > deadline:
                raise LaunchFailed(
                    f"fewer than {count} nodes are online after {seconds:g} s\n{self.logs()}"
                )
            time.sleep(1)

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Flower's command ``flwr`` with this deployment's configuration."""
        command = [executable("flwr"), *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def logs(self, last: int = 3000) -> str:
        """Return the ``last`` characters of every process's log, under the log's name."""
        paths = sorted((self.folder / "logs").glob("*.log"))
        return "\n".join(
            f"{path.name}:\n{path.read_text(encoding='utf-8', errors='replace')[-last:]}"
            for path in paths
        )

    @property
    def _secret(self) -> Path:
        return self.folder / "keys" / "superexec.secret"

    @property
    def _certificates(self) -> Path:
        return self.folder / "certificates"

    @property
    def _certified(self) -> list[str]:
        """Options by which a SuperLink, or a SuperNode's Runtime API, has a certificate."""
        names = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        return [
            word
            for option, file in names.items()
            for word in (f"--ssl-{option}", str(self._certificates / file))
        ]

    @property
    def _trust(self) -> list[str]:
        return ["--root-certificates", str(self._certificates / "ca.crt")]

    def _start(self, name: str, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [executable(command), *arguments],
                env=self.env,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,
                umask=0o077,
            )
        self._started.append(process)
        return process


def make_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of an ECDSA P-384 key pair; create the pair if it does not exist.

    The private key is ``NAME`` (mode 600), the public key ``NAME.pub``.
    """
    private, public = folder / name, folder / f"{name}.pub"
    if not private.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP384R1())
        openssh = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        public.write_bytes(openssh + b"\n")
        write_whole(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return private, public


def make_certificates(folder: Path) -> None:
    """Create ``ca.crt``, and ``server.crt`` with ``server.key`` (mode 600), for loopback.

    The function does not store the authority's private key, so another server needs a new
    authority. If ``server.crt`` exists, the function changes nothing.
    """
    if (folder / "server.crt").exists():
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = trustme.CA(organization_name="flower-ext loopback authority")
    end = datetime.now(UTC) + timedelta(days=365)
    server = authority.issue_cert(HOST, "localhost", not_after=end)
    (folder / "ca.crt").write_bytes(authority.cert_pem.bytes())
    write_whole(folder / "server.key", server.private_key_pem.bytes())
    (certificate,) = server.cert_chain_pems
    (folder / "server.crt").write_bytes(certificate.bytes())


def main() -> None:
    """Run an app on a deployment that begins and ends with this program."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.deployment",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("app", type=Path, help="folder of a Flower app")
    parser.add_argument("--nodes", type=int, default=4, help="number of SuperNodes")
    parser.add_argument("--folder", type=Path, help="keeps certificates, keys, database and logs")
    parser.add_argument("--runs", type=Path, default=os.environ.get(RUNS_VARIABLE, "runs"))
    parser.add_argument("--run", type=Path, help="run directory, new or to continue")
    arguments, options = parser.parse_known_args()
    new = new_run_path(Path(arguments.runs), arguments.app.resolve().name, datetime.now(UTC))
    path = (arguments.run or new).absolute()
    is_begun = (path / "run.json").is_file()
    place = ["--resume", str(path)] if is_begun else ["--set", f"run-directory={path}"]
    state = {"state-folder": str(path / "state")}  # so that a rehearsal can be resumed
    with (
        signals_as_interrupts(),
        TemporaryDirectory() as temporary,
        reaped(),
        Deployment(arguments.folder or Path(temporary), arguments.nodes, state) as deployment,
    ):
        print(f"SuperLink on port {deployment.port}, {arguments.nodes} SuperNodes online")
        os.environ.update(deployment.env)
        clients = ["--clients", str(arguments.nodes)]
        sys.argv[1:] = ["run", str(arguments.app), CONNECTION, *clients, *place, *options]
        command_line.main()


if __name__ == "__main__":
    main()
