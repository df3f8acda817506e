"""Silos that draw the users: the server learns nobody's draw, and sampling amplifies against it."""

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import UldpAvg, UldpSgd
from flower_ext.algorithms.uldp.weights import SAMPLED, USER_WEIGHTS
from flower_ext.data import SiloData
from flower_ext.federation import FederatedStrategy, FederationNotReady
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    PoissonSampling,
    SecureSum,
    epsilon_text,
    gaussian_loss,
    privacy_loss_of,
)
from tests.support.losing import stage_of
from tests.support.silos import COMMON, LOCAL, SEED, SILOS, plan, task
from tests.support.silos import USERS as ALL_USERS
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder

KEY = bytes(range(32))
SAMPLED_USERS = PoissonSampling(ALL_USERS, 0.4)
HONEST = SecureSum(colluding=0.0, dropouts=0.0)


def secure(sampling=SAMPLED_USERS, sums=HONEST, **changes):
    return plan(sampling, noise_placement=sums, **changes)


def strategy_that_draws(method=UldpAvg, **options):
    options = {"plan": secure(), "user_draw": "silos", **COMMON, **options}
    return strategy_of(method, **options)


def run(strategy, *, keys=(KEY,) * SILOS, rounds=1, grid=None, data=None):
    def task_of(context):
        return task(data, draw_key=keys[0])

    if grid is None:
        grid = Recorder(strategy.method.client_app(task_of, allow_seeded_noise=True), SILOS)
    start = ArrayRecord(task().initial_params(SEED))
    result = strategy.start(grid, start, num_rounds=rounds)
    return grid, records.to_arrays(result.arrays)


@pytest.mark.parametrize("weighting", ["equal", "by-records"])
@pytest.mark.parametrize("method", [UldpAvg, UldpSgd])
def test_the_model_is_that_of_a_server_that_draws_the_same_users(method, weighting, monkeypatch):
    drawn = []
    real = PoissonSampling.draw

    def noted(self, rng, so_far=None):
        drawn.append(real(self, rng, so_far))
        return drawn[-1]

    options = {"weighting": weighting, **({} if method is UldpSgd else {"local": LOCAL})}
    monkeypatch.setattr(PoissonSampling, "draw", noted)
    _, ours = run(strategy_that_draws(method, **options))
    users = drawn[-1]
    # One draw in 400 is empty; both runs then leave the model as it was.
    assert drawn[-SILOS:] == [users] * SILOS
    monkeypatch.setattr(PoissonSampling, "draw", lambda self, rng, so_far=None: users)
    _, theirs = run(strategy_of(method, plan=secure(), **COMMON, **options))
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)


def test_the_server_sends_weights_of_all_users_and_stores_no_draw():
    strategy = strategy_that_draws(local=LOCAL)
    grid, _ = run(strategy, rounds=2)
    requests = [m.content[USER_WEIGHTS] for m in grid.sent if stage_of(m) == "train"]
    assert len(requests) == 2 * SILOS
    for record in requests:
        bits = records.to_arrays(record)[SAMPLED]
        assert np.unpackbits(bits, count=ALL_USERS).all()
    assert set(strategy.participations.uploads.values()) == {2}
    assert "users" not in strategy.run.progress.row


def by_view(strategy):
    return {one.view: one for one in strategy.guarantees() if one.basis == "provable"}


def test_sampling_amplifies_against_the_server_and_not_against_a_silo():
    strategy = strategy_that_draws(local=LOCAL)
    run(strategy, rounds=3)
    amplified = privacy_loss_of({strategy.run.mechanism.release: 3}, delta=1e-5).epsilon
    claims = by_view(strategy)
    for view in (AdversaryView.RELEASED_MODELS, AdversaryView.SUM_ONLY):
        assert claims[view].epsilon == pytest.approx(amplified)
    plainly = gaussian_loss(0.4 * np.sqrt(2 / 3), releases=3, delta=1e-5).epsilon
    assert plainly > 1.5 * amplified
    text = " ".join(claims[AdversaryView.SUM_ONLY].assumptions)
    assert "by a key that only they have" in text
    assert f"other silos is {epsilon_text(plainly)}" in text
    assert not any("SIMULATION: sampled users" in t for t in claims[view].assumptions)


class SentAgain(Recorder):
    """A server that asks the first silo for each round a second time, with another model."""

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for message in messages:
            if stage_of(message) == "train" and message.metadata.dst_node_id == 1_000:
                again = records.to_arrays(message.content[records.MODEL])
                message.content[records.MODEL] = records.to_record(
                    {name: array + 1 for name, array in again.items()}
                )
                self.again = [*super().send_and_receive([message], timeout=timeout)]
        return replies


def test_a_server_that_repeats_a_round_with_another_model_is_refused():
    strategy = strategy_that_draws(local=LOCAL)
    app = strategy.method.client_app(task(draw_key=KEY), allow_seeded_noise=True)
    grid, _ = run(strategy, grid=SentAgain(app, SILOS), rounds=2)
    (reply,) = grid.again
    assert "has drawn users up to round 2:" in reply.error.reason
    assert strategy.refusals == []


def test_a_silo_whose_work_fails_after_the_draw_hides_that(monkeypatch):
    """The silo does its work again without data, and must not look like one that repeats a draw."""
    real, failed = SiloData.by_user, []

    def by_user(self):
        if len(self.owners) and not failed:
            failed.append(self)
            raise RuntimeError("a record is odd")
        return real(self)

    monkeypatch.setattr(SiloData, "by_user", by_user)
    strategy = strategy_that_draws(local=LOCAL)
    run(strategy)
    assert len(failed) == 1
    assert strategy.refusals == []


class OtherKeys(Recorder):
    """Silos of which the last has another key, or none."""

    def __init__(self, apps):
        super().__init__(apps[0], SILOS)
        self.apps = apps

    def _answer_in_process(self, messages):
        replies = []
        for message in messages:
            self._app = self.apps[message.metadata.dst_node_id - 1_000]
            replies += super()._answer_in_process([message])
        return replies


@pytest.mark.parametrize(
    ("key", "message"), [(bytes(32), "silos 0 and 2 would draw different users"), (None, "no key")]
)
def test_silos_without_a_common_key_are_refused_before_any_round(key, message):
    strategy = strategy_that_draws(local=LOCAL)
    tasks = [task(draw_key=each) for each in (KEY, KEY, key)]
    apps = [strategy.method.client_app(each, allow_seeded_noise=True) for each in tasks]
    with pytest.raises(FederationNotReady, match=message):
        run(strategy, grid=OtherKeys(apps))
    assert strategy.participations.rounds == 0


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        (secure(FullParticipation(ALL_USERS)), "PoissonSampling"),
        (secure(sums=SecureSum(colluding=0.33, dropouts=0.0)), "colluding=0"),
        (plan(SAMPLED_USERS), "colluding=0"),
    ],
    ids=["all users", "colluding", "plain"],
)
def test_a_plan_that_would_show_the_draw_or_has_none_is_refused(unfit, message):
    with pytest.raises(ValueError, match=message):
        FederatedStrategy(UldpAvg(num_silos=SILOS, user_draw="silos"), unfit)


def test_runs_that_share_a_state_folder_draw_independent_users(tmp_path):
    for _ in range(2):
        strategy = strategy_that_draws(local=LOCAL)
        app = strategy.method.client_app(task(draw_key=KEY), allow_seeded_noise=True)
        grid = Recorder(app, SILOS, {"state-folder": str(tmp_path)})
        run(strategy, grid=grid, rounds=2)
        assert strategy.refusals == []
        assert strategy.participations.rounds == 2


def test_a_seed_repeats_no_round_whose_draw_is_secret():
    assert not strategy_that_draws(local=LOCAL).run.repeats
    assert strategy_of(UldpAvg, plan=secure(), local=LOCAL, **COMMON).run.repeats
