"""Server Adam, adaptive clipping and correlated noise on SuperLink, killed and resumed."""

import itertools
import os
import signal
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flower_ext.federation.storage.folder import deserialised
from flower_ext.federation.storage.noise_stream import FILE
from tests.faults.processes import SETTINGS, WatchedRun, in_process
from tests.support.apps import DP2_FEDSAM
from tests.support.deployment import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

ROUNDS = 5
CORRELATED = {
    "noise": "correlated",
    "noise-placement": "server",
    "sampling": "fixed-size",
    "sampling-rate": 0.5,
    "server-momentum": 0.5,
}
MECHANISMS = {
    "server Adam": {"server-optimizer": "adam", "server-tau": 0.1, "server-momentum": 0.9},
    "adaptive clipping": {"clipping": "adaptive", "noise-multiplier": 0.2},
    "correlated noise": CORRELATED,
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    with Deployment(tmp_path_factory.mktemp("mechanisms") / "four", nodes=4) as running:
        yield running


def kill_server_app(deployment):
    """Send SIGKILL to the ServerApp."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes()
        except OSError:
            continue
        if b"flwr-serverapp" in words and str(deployment.port).encode() in words:
            os.kill(int(command.parent.name), signal.SIGKILL)


def killed_and_resumed(deployment, path, settings):
    """Kill the server of a run in its third round, and return the finished run."""
    killed = WatchedRun(deployment, DP2_FEDSAM.folder, path, settings)
    killed.wait_for_round(3)
    kill_server_app(deployment)
    assert killed.finish().status == "failed"
    resumed = WatchedRun(deployment, DP2_FEDSAM.folder, path, {**settings, "resume": True})
    run = resumed.finish()
    assert resumed.error is None, deployment.logs()
    assert run.status == "completed"
    assert len(run.metadata["starts"]) == 2
    return run


@pytest.mark.parametrize("changes", MECHANISMS.values(), ids=MECHANISMS)
def test_a_killed_and_resumed_run_has_the_model_of_an_uninterrupted_run(
    deployment, tmp_path, changes
):
    settings = {**SETTINGS, **changes, "rounds": ROUNDS}
    run = killed_and_resumed(deployment, tmp_path / "run", settings)
    whole = in_process(tmp_path / "whole", settings, {})
    ours, theirs = (load_file(one.path / "model.safetensors") for one in (run, whole))
    for name, array in theirs.items():
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-6)
    norms = run.metrics().series("clipping_norm")[1]
    assert norms == pytest.approx(whole.metrics().series("clipping_norm")[1], rel=1e-6)
    assert len(set(norms)) == (ROUNDS if "clipping" in changes else 0)
    assert [g.epsilon for g in run.guarantees()] == [g.epsilon for g in whole.guarantees()]


class NoiseWatch(threading.Thread):
    """Reads the stored noise again and again, and collects it by the number of its round."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.file, self.ended = path / FILE, threading.Event()
        self.noises = defaultdict(set)

    def run(self):
        while not self.ended.is_set():
            if self.file.exists():
                kept = deserialised(self.file.read_bytes())
                latest = np.concatenate([a.ravel() for a in kept.arrays["latest"].values()])
                self.noises[kept.values["round"]].add(tuple(latest[:50]))
            time.sleep(0.05)


def test_no_noise_repeats_when_a_server_with_secure_noise_is_killed(deployment, tmp_path):
    settings = {**SETTINGS, **CORRELATED, "rounds": ROUNDS, "seeded-noise": False}
    watch = NoiseWatch(tmp_path / "run")
    watch.start()
    run = killed_and_resumed(deployment, tmp_path / "run", settings)
    watch.ended.set()
    watch.join()
    # The killed attempt has a round of its own, with its own noise.
    reserved = sum(entry["kind"] == "reserve" for entry in run.ledger())
    assert sorted(watch.noises) == [*range(1, reserved + 1)] == [*range(1, ROUNDS + 2)]
    assert all(len(noises) == 1 for noises in watch.noises.values())
    every = [np.array(noise) for noises in watch.noises.values() for noise in noises]
    for one, other in itertools.combinations(every, 2):
        assert not np.isclose(one, other, rtol=0, atol=1e-12).any()
    assert (run.path / FILE).stat().st_mode & 0o077 == 0
