"""A plain app on a SuperLink with TLS and three SuperNodes, two of them guarded."""

import json
import math

import pytest

from flower_ext.privacy.mechanisms.noise import largest_noised_norm
from flower_ext.privacy.shared_ledger import entries_of
from tests.support.deployment import CONNECTION, Deployment
from tests.support.guarding import CLIPPING_NORM, CONSTANTS, NOISE_MULTIPLIER, write_policy
from tests.support.supernode import PLAIN

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MARK = "secret-31337"
LARGEST = largest_noised_norm(CLIPPING_NORM, NOISE_MULTIPLIER * CLIPPING_NORM, 4)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    policies = {node: write_policy(folder / f"site-{node}" / "guard.toml") for node in (0, 1)}
    with Deployment(folder / "flower", nodes=3, policies=policies) as running:
        yield running


def run(deployment, path, way="honest", rounds=2):
    config = f'way="{way}" num-server-rounds={rounds} output="{path}"'
    done = deployment.flwr("run", str(PLAIN), CONNECTION, "--stream", "--run-config", config)
    assert path.exists(), done.stdout + done.stderr + deployment.logs()
    return json.loads(path.read_text())


def charges(deployment, node):
    entries = entries_of(deployment.policies[node].parent / "ledger.jsonl")
    return [entry for entry in entries if entry["kind"] == "charge"]


def split(replies):
    """Return the replies of guarded nodes and those of the other node."""
    guarded = [r for r in replies if r["metrics"].get("metrics", {}) == CONSTANTS]
    return guarded, [r for r in replies if r not in guarded]


def test_an_app_without_this_package_runs_on_two_guarded_nodes_and_one_that_is_not(
    deployment, tmp_path
):
    result = run(deployment, tmp_path / "honest.json")
    guarded, others = split(result["replies"])
    assert [r["error"] for r in result["replies"]] == [None] * 6, deployment.logs()
    assert len({r["node"] for r in guarded}) == 2
    assert len(guarded) == 4
    assert [r["metrics"]["metrics"]["num-examples"] for r in others] == [10, 10]
    first = [r["vector"] for r in guarded if r["round"] == 1]
    assert all(math.hypot(*vector) <= LARGEST for vector in first)
    assert first[0] != first[1]
    assert [r["vector"] for r in others if r["round"] == 1] == [pytest.approx([0.1] * 4)]
    assert all(math.isfinite(number) for number in result["model"])
    assert [len(charges(deployment, node)) for node in (0, 1)] == [2, 2]


def test_of_a_hostile_app_the_superlink_gets_nothing_but_noised_updates(deployment, tmp_path):
    ways = "in-metrics in-another-record in-the-context in-log-lines in-a-huge-norm"
    before = len(charges(deployment, 0))
    result = run(deployment, tmp_path / "hostile.json", way=ways, rounds=1)
    guarded, others = split(result["replies"])
    assert len(guarded) == 2, result
    assert all(MARK in r["records"] or len(r["records"]) > 2 for r in others)
    for reply in guarded:
        assert reply["records"] == ["arrays", "metrics"]
        assert math.hypot(*reply["vector"]) <= LARGEST
    assert len(charges(deployment, 0)) == before + 1
    # Neither the guard nor its SuperNode prints what the app printed; the SuperLink has no copy.
    for path in (deployment.folder / "logs").glob("*.log"):
        if path.name != "node-2.log":
            assert MARK not in path.read_text(errors="replace"), path.name


def test_an_app_that_raises_an_error_looks_as_any_other(deployment, tmp_path):
    result = run(deployment, tmp_path / "error.json", way="in-an-error", rounds=1)
    guarded, others = split(result["replies"])
    assert [r["error"] is None for r in guarded] == [True, True]
    assert [MARK in r["error"] for r in others] == [True]
