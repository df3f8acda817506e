"""Private weighting on SuperLink and SuperNodes, of which one dies in the middle of a round."""

import json
import threading
import time

import pytest

from tests.faults.processes import WatchedRun, kill_node, return_node
from tests.support.apps import ULDP_FL
from tests.support.client_memory import secret_in
from tests.support.deployment import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(2700)]

SILOS, ROUNDS, VICTIM, FATAL = 3, 5, 1, 2
SETTINGS = {
    "method": "uldp-avg-private",
    "num-users": 60,
    "rounds": ROUNDS,
    "round-timeout": 100,  # a node that returns before it is missed leaves its message unanswered
    "evaluate-every": 0,
    "max-records-per-user": 200,
    "user-sampling-rate": 1.0,
}


class Watch(threading.Thread):
    """The last rounds that the victim stored, in order.

    ``reached`` is set where ``what`` is at FATAL.
    """

    def __init__(self, secrets, what="last_round") -> None:
        super().__init__(daemon=True)
        self.secrets, self.seen, self.reached, self.over = secrets, [0], threading.Event(), False
        self.what = what

    def run(self) -> None:
        while not self.over:
            current_round = self.last_round()
            if current_round != self.seen[-1]:
                self.seen.append(current_round)
            if self.last(self.what) >= FATAL:
                self.reached.set()
            time.sleep(0.01)

    def last_round(self) -> int:
        """Return the last round for which this silo has used its masks."""
        return self.last("last_round")

    def last(self, what) -> int:
        """Return a number in the state of the victim; 0 before it has one."""
        for file in self.secrets.rglob("*.secret"):
            silo = json.loads(secret_in(file))
            if silo["index"] == VICTIM:
                return int(silo[what])
        return 0


def test_a_silo_killed_in_a_round_resumes_and_repeats_no_mask(tmp_path):
    """SIGKILL comes after the round was stored and before the silo's sum could leave."""
    watch = Watch(secrets := tmp_path / "secrets")
    node_config = {"state-folder": str(secrets)}
    with Deployment(tmp_path / "flower", nodes=SILOS, node_config=node_config) as deployment:
        watch.start()
        settings = {**ULDP_FL.small, **SETTINGS, "key-bits": 2048, "allow-insecure-keys": True}
        run = WatchedRun(deployment, ULDP_FL.folder, tmp_path / "run", settings)
        assert watch.reached.wait(900), deployment.logs()
        kill_node(deployment, VICTIM)
        assert watch.last_round() == FATAL
        return_node(deployment, VICTIM, seconds=300)
        entries = run.finish(1800).ledger()
        watch.over = True
    assert run.error is None

    ends = [entry for entry in entries if entry["kind"] in ("commit", "discard")]
    kinds = [entry["kind"] for entry in ends]
    assert len(kinds) == ROUNDS
    assert kinds[: FATAL - 1] == ["commit"] * (FATAL - 1)
    assert kinds[FATAL - 1] == "discard"
    reason = ends[FATAL - 1]["reason"]
    assert f"silos [{VICTIM}] sent nothing" in reason
    assert "nothing was decrypted" in reason
    assert kinds[-1] == "commit", kinds  # with its part, so its keys and counts were restored
    assert sorted(set(watch.seen)) == watch.seen  # no round number was repeated
    assert watch.seen[-1] == watch.last_round() == ROUNDS
    used = [number for number, kind in enumerate(kinds, start=1) if kind == "commit"]
    assert set(used) <= set(watch.seen)


def test_a_ring_lwe_silo_killed_while_training_takes_part_again(tmp_path):
    """SIGKILL after the epoch of the round was put on record, and before its round was.

    Nobody knows who is drawn, so silo 0 answers for all silos before every round.
    """
    watch = Watch(secrets := tmp_path / "secrets", "last_epoch")
    node_config = {"state-folder": str(secrets)}
    with Deployment(tmp_path / "flower", nodes=SILOS, node_config=node_config) as deployment:
        watch.start()
        slow = {"protocol": "lattice", "local-epochs": 40}
        hidden = {"user-sampling-rate": 0.5, "draw-choices": 2}
        settings = {**ULDP_FL.small, **SETTINGS, **slow, **hidden}
        run = WatchedRun(deployment, ULDP_FL.folder, tmp_path / "run", settings)
        assert watch.reached.wait(900), deployment.logs()
        kill_node(deployment, VICTIM)
        assert watch.last_round() == FATAL - 1
        return_node(deployment, VICTIM, seconds=300)
        entries = run.finish(1800).ledger()
        watch.over = True
    assert run.error is None
    kinds = [entry["kind"] for entry in entries if entry["kind"] in ("commit", "discard")]
    assert len(kinds) == ROUNDS
    assert kinds[FATAL - 2 : FATAL] == ["commit", "discard"]
    assert kinds[-1] == "commit", kinds
    assert sorted(set(watch.seen)) == watch.seen  # no round number came back
    assert watch.seen[-1] == watch.last_round() == ROUNDS
    committed = {number for number, kind in enumerate(kinds, start=1) if kind == "commit"}
    assert committed <= set(watch.seen)
