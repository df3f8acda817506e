"""Messages of clients in a secure sum, the run's guarantees, and plans that it refuses."""

import numpy as np
import pytest
from scipy import stats

from flower_ext.federation.messages import records
from flower_ext.privacy import (
    AdversaryView,
    FixedSizeSampling,
    SecureSum,
)
from flower_ext.training import LocalTraining
from tests.support.losing import Losing, stage_of
from tests.support.masked_runs import assert_same, expected_model, run
from tests.support.secure_runs import CLIENTS, plan, strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import initial


def uploads(grid):
    """Return the contents of all replies to training messages."""
    return [
        reply.content
        for reply in grid.received
        if reply.metadata.message_type.startswith("train") and reply.has_content()
    ]


def test_nothing_but_uniform_bytes_leaves_a_client_that_trains():
    grid, _ = run(strategy_of(seeded_noise=False), rounds=8)
    sent = uploads(grid)
    assert len(sent) == 8 * CLIENTS
    assert {tuple(content.keys()) for content in sent} == {(records.UPDATE,)}
    masked = [content[records.UPDATE]["message"].numpy()[-4 * 56 :] for content in sent]
    counts = np.bincount(np.concatenate(masked), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-10


def test_the_same_update_is_sent_as_other_bytes_in_another_run():
    one, two = (uploads(run(strategy_of())[0])[0][records.UPDATE]["message"] for _ in range(2))
    first, second = (array.numpy()[-4 * 56 :] for array in (one, two))
    assert (first == second).mean() < 0.1


def sums_only(strategy):
    """Return the provable guarantee against an adversary that sees the sums alone."""
    return next(
        one
        for one in strategy.guarantees()
        if one.view is AdversaryView.SUM_ONLY and one.basis == "provable"
    )


def test_an_adversary_that_sees_sums_needs_only_assumptions_the_run_meets():
    plain, secure = strategy_of(plan=plan(noise_placement="client")), strategy_of()
    for strategy in (plain, secure):
        run(strategy, rounds=3)
    before, after = sums_only(plain), sums_only(secure)
    assert any("which this run does not provide" in a for a in before.assumptions)
    assert not any("which this run does not provide" in a for a in after.assumptions)
    assert any("at most 0 of each cohort of 8 collude;" in a for a in after.assumptions)
    assert any("discrete Gaussian" in a for a in after.assumptions)
    # Eight clients without collusion: the least number of answers has all of the noise.
    assert after.epsilon == pytest.approx(before.epsilon)


def test_the_noise_of_clients_that_may_collude_is_not_counted():
    sums = SecureSum(colluding=0.25, dropouts=0.25)
    assert sums.for_cohort(CLIENTS).honest_answers == 4  # of 6 answers
    colluding = strategy_of(plan=plan(noise_placement=sums))
    run(colluding, rounds=2)
    assert colluding.participations.in_sums == pytest.approx(2 * 6 / 4)
    assert sums_only(colluding).epsilon > 0


@pytest.mark.parametrize("lost", [pytest.param((), marks=pytest.mark.full), (0, 5)])
def test_the_released_noise_is_the_same_however_many_answered(lost):
    """Models learn nothing over the rounds, so the released sum is noise only."""
    still = LocalTraining(epochs=1, batch_size=10, learning_rate=1e-30)
    models, start = [], records.to_arrays(initial())
    for _ in range(20):
        strategy = strategy_of(local=still, seeded_noise=False)
        _, model = run(strategy, Losing, lost=[(partition, "train") for partition in lost])
        models.append(np.concatenate([(model[n] - start[n]).ravel() for n in sorted(start)]))
    noise = np.concatenate(models) * CLIENTS
    sums = plan().mechanism()
    expected = sums.noise_stddev * np.sqrt(CLIENTS / sums.masked.parameters.least_answers)
    assert noise.std() == pytest.approx(expected, rel=7 / np.sqrt(2 * noise.size))


def test_a_client_that_names_another_member_is_lost():
    class Impersonating(Recorder):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            stages = {m.metadata.message_type for m in self.sent[-len(replies) :]}
            if any(kind.startswith("train") for kind in stages):
                replies[0].content = replies[1].content
            return replies

    strategy = strategy_of()
    _, model = run(strategy, Impersonating)
    assert any("the client that sent the message" in refusal for refusal in strategy.refusals)
    assert_same(model, expected_model(set(range(1, CLIENTS))))


def test_clients_of_a_fixed_size_are_drawn_and_summed():
    sampling = FixedSizeSampling(population=CLIENTS, size=5)
    sums = SecureSum(colluding=0.0, dropouts=0.2)
    strategy = strategy_of(plan=plan(sampling=sampling, noise_placement=sums))
    grid, _ = run(strategy, rounds=3)
    assert sum(stage_of(message) == "train" for message in grid.sent) == 15
    assert strategy.refusals == []
