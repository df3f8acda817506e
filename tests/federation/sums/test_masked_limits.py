"""Demands of a node's owner on secure sums, in whole runs."""

import numpy as np
import pytest
from flwr.app import ConfigRecord

from flower_ext.errors import InvalidValue
from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.sums.masked import check_limits, identities_of
from flower_ext.privacy import AdversaryView, SecureScores, SecureSum
from flower_ext.secure.aggregation.context import RoundContext
from tests.support.identities import write_identities
from tests.support.secure_runs import CLIENTS, plan, strategy_of
from tests.support.worlds import initial, task

SIGNED = plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.0, signed=True))


def run(strategy, configs):
    app = strategy.method.client_app(task(), allow_seeded_noise=True)
    grid = InProcessGrid(app, CLIENTS)
    for context, config in zip(grid.contexts.values(), configs, strict=True):
        context.node_config.update(config)
    result = strategy.start(grid, initial(), num_rounds=1)
    return records.to_arrays(result.arrays), strategy.run.clients.refusals


def test_a_signed_run_releases_the_model_of_an_unsigned_one(tmp_path):
    unsigned = plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.0))
    expected, _ = run(strategy_of(plan=unsigned), [{}] * CLIENTS)
    strategy = strategy_of(plan=SIGNED)
    model, refusals = run(strategy, write_identities(tmp_path, CLIENTS))
    assert not refusals
    assert all(np.array_equal(model[name], expected[name]) for name in expected)
    claims = [one for one in strategy.guarantees() if one.view is AdversaryView.SUM_ONLY]
    assert any("the server may lie" in text for one in claims for text in one.assumptions)


def refusals_of(strategy, configs):
    """Return the reasons for which a round fails that no client refuses for its data."""
    with pytest.raises(FederationNotReady) as failure:
        run(strategy, configs)
    return str(failure.value)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"least-sum-members": CLIENTS + 1}, "requires least-sum-members"),
        ({"least-sum-threshold-share": 1.1}, "requires least-sum-threshold-share"),
        ({"least-honest-answers": CLIENTS + 1}, "requires least-honest-answers"),
        ({"least-honest-answers": 5, "sum-colluders": CLIENTS}, "a sum of only 0 honest members"),
    ],
)
def test_sums_that_show_too_much_are_refused(node, expected):
    assert expected in refusals_of(strategy_of(), [node] * CLIENTS)
    fair = {"least-sum-members": 5, "least-sum-threshold-share": 0.5, "require-secure-sum": True}
    fair |= {"least-honest-answers": 5}
    _, refusals = run(strategy_of(), [fair] * CLIENTS)
    assert not refusals


@pytest.mark.parametrize("colluders", range(4))
@pytest.mark.parametrize("signed", [False, True])
def test_a_node_counts_the_honest_members_that_the_plan_counts(colluders, signed):
    placement = SecureSum(colluding=colluders / 20, dropouts=0.05, signed=signed)
    parameters = placement.for_cohort(20)
    context = RoundContext(
        **{**vars(parameters), "colluders": 0},  # a node believes its owner, not the server
        run=bytes(16),
        round_number=1,
        graph=bytes(32),
        bits=32,
        length=1,
    )
    honest = parameters.honest_answers
    limits = {"sum-colluders": colluders, "least-honest-answers": honest}
    check_limits(context, limits)
    with pytest.raises(PermissionError, match=f"a sum of only {honest} honest"):
        check_limits(context, {**limits, "least-honest-answers": honest + 1})


def test_one_missing_file_is_named_to_its_owner():
    with pytest.raises(InvalidValue, match="expected both sum-identity-key and sum-members"):
        identities_of({"sum-members": "members.pub"})


def test_a_node_that_signs_refuses_unsigned_sums_and_the_reverse(tmp_path):
    assert "this round is not signed" in refusals_of(
        strategy_of(), write_identities(tmp_path, CLIENTS)
    )
    assert "sum-identity-key" in refusals_of(strategy_of(plan=SIGNED), [{}] * CLIENTS)


SUM_ONLY = {"require-secure-sum": True}


@pytest.mark.parametrize("placement", ["client", "server"])
def test_no_upload_leaves_in_the_clear(placement):
    """The downgrade: the same share of noise, but in an upload of its own."""
    strategy = strategy_of(plan=plan(noise_placement=placement))
    assert "set require-secure-sum=true" in refusals_of(strategy, [SUM_ONLY] * CLIENTS)


@pytest.mark.parametrize("entry", ["report-size", "diagnostics", "training-loss"])
def test_no_number_leaves_beside_a_masked_upload(entry):
    strategy = strategy_of()
    real = strategy.run.round_record
    strategy.run.round_record = lambda *args, **entries: ConfigRecord(
        {**real(*args, **entries), entry: True}
    )
    assert "set require-secure-sum=true" in refusals_of(strategy, [SUM_ONLY] * CLIENTS)


def test_no_upload_without_cells_leaves_in_a_masked_sum():
    strategy = strategy_of()
    real = strategy.run.round_record
    strategy.run.round_record = lambda *args, **entries: ConfigRecord(
        {name: value for name, value in real(*args, **entries).items() if name != "cell"}
    )
    assert "without a cell: expected" in refusals_of(strategy, [{}] * CLIENTS)


def test_scores_leave_in_secure_sums_alone():
    strategy = strategy_of(evaluate_every=1)
    _, refusals = run(strategy, [SUM_ONLY] * CLIENTS)
    assert len(refusals) == CLIENTS
    assert all("an update or scores" in text for text in refusals)
    scores = SecureScores(noise_multiplier=1.0, times=1)
    strategy = strategy_of(plan=plan(queries=(scores,)), evaluate_every=1)
    _, refusals = run(strategy, [SUM_ONLY] * CLIENTS)
    assert not refusals
