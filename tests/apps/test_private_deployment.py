"""Private weighting on SuperLink and SuperNodes of which one dies in the middle of a round."""

import json
import os
import signal
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from flower_ext.reporting import RunDirectory
from tests.apps.app import ULDP_FL
from tests.apps.test_engines import BIN, Flower, free_port, wait_for_port

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2700)]

SILOS, ROUNDS, VICTIM, FATAL = 3, 7, 1, 2
SETTINGS = {
    "method": "uldp-avg-private",
    "num-users": 60,
    "rounds": ROUNDS,
    "evaluate-every": 0,
    "key-bits": 2048,
    "allow-insecure-keys": True,
    "max-records-per-user": 200,
    "user-sampling-rate": 1.0,
}


class KeyedFlower(Flower):
    """SuperNodes with keys of their own, so that one that restarts is the node that it was."""

    def deploy(self, nodes: int) -> None:
        self.port = free_port()
        certificate(self.home)
        for node in range(nodes):
            node_key(self.home / f"node-{node}")
        tls = {"ssl-ca-certfile": "tls.crt", "ssl-certfile": "tls.crt", "ssl-keyfile": "tls.key"}
        self.start(
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *(part for n, file in tls.items() for part in (f"--{n}", str(self.home / file))),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        )
        (self.home / "config.toml").write_text(
            '[superlink]\ndefault = "loopback"\n\n[superlink.loopback]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.home}/tls.crt"\n'
        )
        wait_for_port(self.port)
        for node in range(nodes):
            public = str(self.home / f"node-{node}.pub")
            done = self.command("flwr", "supernode", "register", public, "loopback")
            assert done.returncode == 0, done.stdout + done.stderr
            self.start_node(node, nodes)

    def start_node(self, node: int, nodes: int) -> None:
        """A SuperNode, running; one that died is let in again when Flower missed it for a while."""
        facts = f"partition-id={node} num-partitions={nodes} secrets-folder='{self.secrets(node)}'"
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            self.start(
                "flower-supernode",
                *("--root-certificates", str(self.home / "tls.crt")),
                *("--superlink", f"127.0.0.1:{self.port}"),
                *("--host", "127.0.0.1", "--port", str(free_port())),
                *("--auth-supernode-private-key", str(self.home / f"node-{node}")),
                *("--node-config", facts),
            )
            if self.is_in(self.started[-1]):
                return
        raise TimeoutError(f"node {node} is not let in")

    def is_in(self, process: subprocess.Popen[bytes]) -> bool:
        log = self.home / f"{len(self.started) - 1}-flower-supernode.log"
        while process.poll() is None:
            if "SuperNode ID" in log.read_text():
                return True
            time.sleep(0.5)
        return False

    def secrets(self, node: int) -> Path:
        return self.home / f"secrets-{node}"

    def last_round(self, node: int) -> int:
        """The last round for which this silo has used its masks, as it has it on disk."""
        files = list(self.secrets(node).glob("*.secret")) if self.secrets(node).exists() else []
        if not files:
            return 0
        (file,) = files
        return int(json.loads(json.loads(file.read_bytes())["silo"])["last_round"])

    def stop(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        self.started = [p for p in self.started if p.poll() is None]
        super().stop()


def certificate(home: Path) -> None:
    """Signed by itself, for this machine."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (home / "tls.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (home / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def node_key(path: Path) -> None:
    """An ECDSA key as Flower wants it."""
    key, openssh = ec.generate_private_key(ec.SECP384R1()), serialization.Encoding.OpenSSH
    public = key.public_key().public_bytes(openssh, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )


class Watch(threading.Thread):
    """Every last round that a silo has had on disk, in order; ``reached`` is set at FATAL."""

    def __init__(self, flower: KeyedFlower) -> None:
        super().__init__(daemon=True)
        self.flower, self.seen, self.reached, self.over = flower, [0], threading.Event(), False

    def run(self) -> None:
        while not self.over:
            now = self.flower.last_round(VICTIM)
            if now != self.seen[-1]:
                self.seen.append(now)
            if now >= FATAL:
                self.reached.set()
            time.sleep(0.01)


@pytest.fixture
def flower(tmp_path):
    processes = KeyedFlower(tmp_path / "flwr")
    yield processes
    processes.stop()


def test_a_silo_that_is_killed_in_a_round_goes_on_from_its_folder_and_repeats_no_mask(
    flower, tmp_path
):
    """SIGKILL after the round was put on record and before its sum could leave."""
    flower.deploy(SILOS)
    victim = flower.started[-SILOS + VICTIM]
    watch = Watch(flower)
    watch.start()
    words = {**ULDP_FL.small, **SETTINGS, "run-directory": tmp_path / "run"}
    sets = [f"{n}={str(v).lower() if isinstance(v, bool) else v}" for n, v in words.items()]
    options = [part for text in sets for part in ("--set", text)]
    run = subprocess.Popen(
        [str(BIN / "flower-ext"), "run", str(ULDP_FL.folder), "loopback", *options],
        env=flower.env,
        cwd=flower.home,
        stdout=(flower.home / "run.log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    flower.started.append(run)
    assert watch.reached.wait(600), flower.logs()
    os.killpg(victim.pid, signal.SIGKILL)
    assert flower.last_round(VICTIM) == FATAL
    flower.start_node(VICTIM, SILOS)
    assert run.wait(1800) == 0, flower.logs()
    watch.over = True

    entries = RunDirectory.open(tmp_path / "run").ledger()
    ends = [entry for entry in entries if entry["kind"] in ("commit", "discard")]
    kinds = [entry["kind"] for entry in ends]
    assert len(kinds) == ROUNDS
    assert kinds[: FATAL - 1] == ["commit"] * (FATAL - 1)
    assert kinds[FATAL - 1] == "discard"
    reason = ends[FATAL - 1]["reason"]
    assert f"silos [{VICTIM}] sent nothing" in reason
    assert "nothing was decrypted" in reason
    assert kinds[-1] == "commit", kinds  # with its part, so from its keys and its counts
    assert sorted(set(watch.seen)) == watch.seen  # no round number came back
    assert watch.seen[-1] == flower.last_round(VICTIM) == ROUNDS
    used = [number for number, kind in enumerate(kinds, start=1) if kind == "commit"]
    assert set(used) <= set(watch.seen)
