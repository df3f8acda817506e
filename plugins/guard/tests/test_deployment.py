"""A plain app on a SuperLink with TLS and three SuperNodes, two of them guarded."""

import json
import math

import pytest
from guarding import (
    CLIPPING_NORM,
    CONSTANTS,
    NOISE_MULTIPLIER,
    write_policy,
    write_sum_policy,
)
from supernode import PLAIN

from flower_ext.privacy.mechanisms.noise import largest_noised_norm
from flower_ext.privacy.shared_ledger import entries_of
from tests.support.deployment import CONNECTION, Deployment
from tests.support.identities import write_identities

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MARK = "secret-31337"
LARGEST = largest_noised_norm(CLIPPING_NORM, NOISE_MULTIPLIER * CLIPPING_NORM, 4)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    policies = {node: write_policy(folder / f"site-{node}" / "guard.toml") for node in (0, 1)}
    with Deployment(folder / "flower", nodes=3, policies=policies) as running:
        yield running


def run(deployment, path, way="honest", rounds=2, more=""):
    config = f'way="{way}" num-server-rounds={rounds} output="{path}" {more}'
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


def test_a_foreign_app_runs_on_guarded_and_unguarded_nodes(deployment, tmp_path):
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


def test_guarded_sites_answer_in_secure_sums_for_an_app_that_knows_none(tmp_path):
    identities = write_identities(tmp_path, 3)
    policies = {
        site: write_sum_policy(tmp_path / f"site-{site}" / "guard.toml", identity)
        for site, identity in enumerate(identities)
    }
    with Deployment(tmp_path / "flower", nodes=3, policies=policies) as sites:
        result = run(sites, tmp_path / "sums.json", rounds=1, more="secure-sums=true")
        assert result["refusals"] == [], sites.logs()
        assert 0 < 3 * math.hypot(*result["model"]) <= largest_noised_norm(3.0, 1.0, 4)
        for site in range(3):
            (charge,) = charges(sites, site)
            views = {claim["view"] for claim in charge["claims"]}
            assert views == {"each-upload", "sum-only"}
