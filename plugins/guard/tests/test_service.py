"""The guard on a SuperNode's real Runtime API, with real apps in real processes."""

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from dying_guard import PLACES
from flwr.app import Error
from guarding import (
    CLIPPING_NORM,
    CONSTANTS,
    NOISE_MULTIPLIER,
    needs_namespaces,
    write_policy,
)
from supernode import LoopbackSuperNode

from flower_ext.errors import InvalidValue
from flower_ext.privacy import AdversaryView, Ledger
from flower_ext.privacy.mechanisms.noise import largest_noised_norm
from flower_ext.privacy.study_composition import study_guarantees
from flower_ext_guard.flower_runtime import Runtime
from flower_ext_guard.policy import read_policy
from flower_ext_guard.service import Guard
from tests.support.grids import grid

pytestmark = [pytest.mark.timeout(300)]

MARK = b"secret-31337"
LARGEST = largest_noised_norm(CLIPPING_NORM, NOISE_MULTIPLIER * CLIPPING_NORM, 4)


@pytest.fixture
def node():
    with LoopbackSuperNode() as running:
        yield running


def guard_of(node, path, **values):
    """Return a guard between a node and its apps; its log is in ``lines``."""
    policy = read_policy(write_policy(path / "site" / "guard.toml", **values))
    runtime = Runtime(node.address, root_certificates=None, secret=b"secret")
    lines = []
    guard = Guard(policy, runtime, tell=lines.append)
    guard.lines = lines
    return guard


def charges(guard_or_path):
    path = guard_or_path if isinstance(guard_or_path, Path) else guard_or_path.policy.ledger
    entries = Ledger.read(path) if path.exists() else []
    return [entry for entry in entries if entry["kind"] == "charge"]


def app_log(guard):
    return guard.policy.path.with_suffix(".app.log").read_bytes()


class Listener:
    """Servers on loopback and on a Unix socket that note what they receive."""

    def __init__(self, path: Path):
        self.received, self.path = [], path
        self._servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)]
        self._servers[1].bind(str(path))
        self._servers[1].listen()
        self.port = self._servers[0].getsockname()[1]
        for server in self._servers:
            threading.Thread(target=self._serve, args=[server], daemon=True).start()

    def _serve(self, server):
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return
            with link:
                self.received.append(link.recv(1000))

    def close(self):
        for server in self._servers:
            server.close()


@pytest.fixture
def world(tmp_path):
    """Return everything outside that an app may try to reach."""
    shared = tmp_path / "shared"
    shared.mkdir()
    hidden = tmp_path / "site" / "hidden"
    hidden.parent.mkdir()
    hidden.write_bytes(b"key")
    listener = Listener(tmp_path / "socket")
    listener.config = {
        "port": listener.port,
        "unix": str(listener.path),
        "folder": str(shared),
        "hidden": str(hidden),
    }
    listener.shared = shared
    yield listener
    listener.close()


def check_only_a_noised_update(reply):
    """Check that a reply holds a noised update and constants, and nothing else."""
    assert reply.has_content()
    assert set(reply.content) == {"arrays", "metrics"}
    assert dict(reply.content["metrics"]) == CONSTANTS
    ((name, array),) = reply.content["arrays"].items()
    assert (name, array.shape, array.dtype) == ("vector", (4,), "float32")
    vector = array.numpy()
    assert np.isfinite(vector).all()
    assert 0 < np.linalg.norm(vector) <= LARGEST
    assert MARK not in array.data


WAYS = [
    ("in-metrics in-another-record in-the-context in-log-lines", "finished"),
    ("in-array-names", "finished"),
    ("in-record-names", "finished"),
    ("in-an-error", "raised"),
    ("in-shapes", "finished"),
    ("in-types", "finished"),
    ("in-a-huge-norm", "finished"),
    ("in-nan", "finished"),
    ("in-megabytes", "finished"),
    ("in-garbage", "ended itself"),
    ("through-a-crash", "ended itself"),
    ("through-a-socket", "raised"),
    ("through-a-unix-socket", "raised"),
    ("through-a-shared-file", "finished"),
    ("by-a-process-that-stays", "finished"),
    ("by-killing-the-guard", "finished"),
    ("by-reading-secrets", "raised"),
    ("by-writing-a-kernel-setting", "raised"),
    ("by-asking-for-a-key", "raised"),
    ("by-inner-namespaces", "raised"),
]
DAILY = ("in-metrics in-another-record in-the-context in-log-lines", "in-an-error")


@needs_namespaces
@pytest.mark.parametrize(("way", "end"), grid(WAYS, lambda case: case[0] in DAILY))
def test_no_way_out_leads_past_the_noise(node, tmp_path, world, way, end):
    guard = guard_of(node, tmp_path)
    node.send(way=way, **world.config)
    assert guard.serve_one()
    (reply,) = node.replies()
    check_only_a_noised_update(reply)
    assert len(charges(guard)) == 1
    assert world.received == []
    assert list(world.shared.iterdir()) == []
    assert not any(MARK.decode() in line for line in guard.lines)
    assert b"Successfully installed" in app_log(guard)
    assert (b"Traceback" in app_log(guard)) == (end == "raised")
    children = psutil.Process().children(recursive=True)
    assert not any("flower_ext_guard.child" in " ".join(each.cmdline()) for each in children)


def test_without_isolation_the_same_attacks_succeed(node, tmp_path, world):
    way = "through-a-socket through-a-unix-socket through-a-shared-file"
    guard = guard_of(node, tmp_path, isolation="none")
    node.send(way=way, **world.config)
    assert guard.serve_one()
    check_only_a_noised_update(*node.replies())
    assert world.received == [MARK, MARK]
    assert [path.name.encode() for path in world.shared.iterdir()] == [MARK]
    for folder in ("/tmp", "/var/tmp", "/dev/shm"):
        Path(folder, MARK.decode()).unlink(missing_ok=True)


@needs_namespaces
def test_an_app_that_hangs_is_ended_and_looks_as_any_other(node, tmp_path):
    guard = guard_of(node, tmp_path, timeout=6)
    node.send(way="by-waiting")
    started = time.monotonic()
    assert guard.serve_one()
    assert time.monotonic() - started < 60
    check_only_a_noised_update(*node.replies())
    assert len(charges(guard)) == 1


@pytest.mark.full
@needs_namespaces
def test_replies_leave_at_one_time_whether_the_app_crashes_or_hangs(node, tmp_path):
    guard = guard_of(node, tmp_path, timeout=8, more="reply-after = 20")
    times = []
    for way in ("through-a-crash", "by-waiting"):
        node.send(way=way)
        started = time.monotonic()
        guard.serve_one()
        times.append(time.monotonic() - started)
        (reply,) = node.replies()
        check_only_a_noised_update(reply)
        # The reply's own clock tells no more than its arrival.
        assert reply.metadata.created_at == pytest.approx(time.time(), abs=5)
    assert min(times) >= 20


@needs_namespaces
def test_memory_stays_on_the_node_and_returns_to_the_app(node, tmp_path):
    guard = guard_of(node, tmp_path)
    node.send(way="in-the-context")
    guard.serve_one()
    node.replies()
    assert node.memory["kept"]["mark"] == MARK.decode()
    context = node.state.get_run_series_context(node.series)
    assert context.node_config == {"partition-id": 0}
    assert context.run_config == {}


def test_messages_and_apps_outside_the_policy_are_refused_at_no_cost(node, tmp_path):
    guard = guard_of(node, tmp_path, apps=f'["{"0" * 64}"]')
    node.send()
    guard.serve_one()
    (reply,) = node.replies()
    assert node.digest in reply.error.reason
    guard = guard_of(node, tmp_path)
    for message_type in ("query", "query.keys", "train.other"):
        node.send(message_type=message_type)
        guard.serve_one()
        (reply,) = node.replies()
        assert repr(message_type) in reply.error.reason
    node.send(arrays={"count": np.array([1, 2])})
    guard.serve_one()
    assert "no floating-point array" in node.replies()[0].error.reason
    node.send(error=Error(0, "no content"))
    guard.serve_one()
    assert "only messages with content" in node.replies()[0].error.reason
    node.send(message_type="evaluate")
    guard.serve_one()
    (reply,) = node.replies()
    assert dict(reply.content["metrics"]) == {"num-examples": 1, "eval_loss": 0.0}
    assert set(reply.content) == {"metrics"}
    assert charges(guard) == []


@needs_namespaces
def test_a_spent_budget_is_refused_by_name_before_the_app_runs(node, tmp_path):
    guard = guard_of(node, tmp_path, epsilon=27)  # one reply costs 26.4
    node.send()
    guard.serve_one()
    check_only_a_noised_update(*node.replies())
    guard.policy.path.with_suffix(".app.log").unlink()
    node.send()
    guard.serve_one()
    (reply,) = node.replies()
    assert reply.error.reason == "flower-ext guard: the privacy budget of this site is spent"
    assert not guard.policy.path.with_suffix(".app.log").exists()
    (charge,) = charges(guard)
    guarantees = study_guarantees(Ledger.read(guard.policy.ledger), charge["delta"])
    assert AdversaryView.EACH_UPLOAD in {guarantee.view for guarantee in guarantees}
    for guarantee in guarantees:
        assert guarantee.epsilon == pytest.approx(charge["epsilon"])


@needs_namespaces
def test_replies_after_a_policy_change_do_not_count_with_its_noise(node, tmp_path):
    guard = guard_of(node, tmp_path)
    node.send()
    guard.serve_one()
    path = guard.policy.path
    path.write_text(path.read_text().replace("noise-multiplier = 0.5", "noise-multiplier = 50.0"))
    guard.policy = read_policy(path)
    node.send()
    guard.serve_one()
    first, second = charges(guard)
    assert second["epsilon"] < 1 < first["epsilon"]
    (together,) = study_guarantees(Ledger.read(guard.policy.ledger), first["delta"])[:1]
    assert together.epsilon >= first["epsilon"]


def test_a_supernode_that_hands_messages_to_everybody_is_noticed():
    for secret, is_open in ((b"secret", False), (None, True)):
        with LoopbackSuperNode(secret=secret) as node:
            runtime = Runtime(node.address, root_certificates=None, secret=b"secret")
            assert runtime.is_open() is is_open


def test_isolation_that_does_not_work_is_refused(tmp_path):
    from flower_ext_guard.app_process import check_isolation

    path = write_policy(tmp_path / "guard.toml")
    path.write_text(path.read_text().replace('"namespaces"', '["env"]'))
    with pytest.raises(InvalidValue, match="does not work here"):
        check_isolation(read_policy(path))


class DyingGuards:
    """Guards that die at points, as forks of one process."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("dying_guard.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, node, policy, point):
        order = {"address": node.address, "policy": str(policy), "point": point}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline().removeprefix("ended "))

    def close(self):
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def guards():
    guards = DyingGuards()
    yield guards
    guards.close()


POINTS = [(name, when, 1) for name in PLACES for when in ("before", "after")]
POINTS += [("push an array", "before", 2), ("push an array", "after", 3)]
BEFORE_THE_REPLY_IS_STORED = (
    *("pull", "check the budget", "start the app", "run the app", "noise", "make the reply"),
)
KILLS = [(BEFORE_THE_REPLY_IS_STORED[-1], "after", 1), ("charge", "after", 1)]
"""The next test kills a guard after its reply was sent."""


def is_of_the_supernode(reply):
    return reply.has_error() and reply.error.reason == "ClientApp stopped responding."


@needs_namespaces
@pytest.mark.parametrize("points", grid([POINTS, KILLS], lambda case: case is KILLS), ids=len)
def test_a_killed_guard_sends_nothing_twice_and_loses_nothing_that_was_charged(
    node, tmp_path, guards, points
):
    policy = write_policy(tmp_path / "guard.toml", epsilon=1e6)
    ledger, pending = tmp_path / "ledger.jsonl", tmp_path / "guard.pending"
    waiting = set()
    for point in points:
        before = len(charges(ledger))
        waiting.add(node.send())
        assert guards.run(node, policy, point) == -9, point
        is_stored = point[0] not in BEFORE_THE_REPLY_IS_STORED and point[:2] != (
            "store the reply",
            "before",
        )
        assert pending.exists() == is_stored
        assert guards.run(node, policy, None) == 0
        assert not pending.exists()
        # After half a minute, the SuperNode itself answers a message whose guard died.
        replies = [reply for reply in node.replies() if not is_of_the_supernode(reply)]
        # Charged and sent, or neither. After half a minute, the SuperNode hands out a task again
        # whose guard died before it pulled; so there may be one more.
        assert len(replies) == len(charges(ledger)) - before >= int(is_stored), point
        for reply in replies:
            check_only_a_noised_update(reply)
            # A message that no guard pulled is handed to the next one.
            waiting.remove(reply.metadata.reply_to_message_id)


@needs_namespaces
def test_a_reply_sent_before_a_kill_is_repeated_bit_for_bit(node, tmp_path, guards):
    policy = write_policy(tmp_path / "guard.toml")
    node.send()
    assert guards.run(node, policy, ("finish", "before", 1)) == -9
    first = node.replies()  # as the SuperNode sends them on
    assert guards.run(node, policy, None) == 0
    again = node.replies()
    assert [r.metadata.message_id for r in again] == [r.metadata.message_id for r in first]
    assert again[0].content["arrays"]["vector"].data == first[0].content["arrays"]["vector"].data
    assert len(charges(tmp_path / "ledger.jsonl")) == 1


def _children_since(before):
    return [each for each in psutil.Process().children(recursive=True) if each not in before]


@needs_namespaces
@pytest.mark.parametrize("member", grid(range(3), lambda member: member == 2))
def test_a_killed_app_looks_as_any_other(node, tmp_path, member):
    """The members of its family: the command, the namespace's first process, the app itself."""
    guard = guard_of(node, tmp_path)
    node.send(way="by-waiting")
    before = psutil.Process().children(recursive=True)
    serving = threading.Thread(target=guard.serve_one)
    serving.start()
    while len(family := _children_since(before)) < 3:
        time.sleep(0.05)
    family[member].kill()
    serving.join(60)
    assert not serving.is_alive()
    check_only_a_noised_update(*node.replies())
    assert len(charges(guard)) == 1
