"""A strategy whose methods Flower's own loop, a wrapper or a user's code calls."""

import numpy as np
import pytest
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Strategy

from flower_ext.algorithms import DPFedAvg
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.messages.roster import FederationNotReady
from flower_ext.privacy import (
    Budget,
    BudgetExhausted,
    FullParticipation,
    ReleasePlan,
    privacy_loss_of,
)
from tests.support.worlds import initial, task

CLIENTS = 4
CONFIG = ConfigRecord()


def strategy_of(**options):
    plan = ReleasePlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=0.5,
        noise_multiplier=1.0,
        rounds=4,
        delta=1e-2,
        noise_placement="server",
    )
    return FederatedStrategy(DPFedAvg(), plan, **{"evaluate_every": 0, "timeout": 1.0, **options})


def grid_of(clients=CLIENTS):
    return InProcessGrid(DPFedAvg.client_app(task()), clients)


@pytest.mark.parametrize("every", [0, 2])
def test_flowers_loop_runs_rounds_without_evaluation(every):
    strategy = strategy_of(evaluate_every=every)
    result = Strategy.start(strategy, grid_of(), initial(), num_rounds=3)
    assert strategy.participations.rounds == 3
    assert set(result.evaluate_metrics_clientapp) == ({2} if every else set())


def test_replies_without_a_request_are_refused_in_words():
    with pytest.raises(InvalidValue, match="expected configure_train first"):
        strategy_of().aggregate_train(1, [])
    assert strategy_of().aggregate_evaluate(1, []) is None


def test_a_round_that_could_not_begin_takes_no_replies():
    release = strategy_of().run.mechanism.release
    one_round = privacy_loss_of([release], delta=1e-2).epsilon
    strategy, grid = strategy_of(budget=Budget(epsilon=1.01 * one_round, delta=1e-2)), grid_of()
    replies = grid.send_and_receive(strategy.configure_train(1, initial(), CONFIG, grid))
    strategy.aggregate_train(1, replies)
    with pytest.raises(BudgetExhausted):
        strategy.configure_train(2, initial(), CONFIG, grid)
    with pytest.raises(InvalidValue, match="expected configure_train first"):
        strategy.aggregate_train(2, [])


def test_an_evaluation_after_a_failed_connection_connects_again():
    strategy = strategy_of(evaluate_every=1)
    with pytest.raises(FederationNotReady):
        strategy.configure_train(1, initial(), CONFIG, grid_of(clients=2))
    messages = list(strategy.configure_evaluate(1, initial(), CONFIG, grid_of()))
    assert len(messages) == CLIENTS


def test_rounds_that_were_begun_and_dropped_count():
    strategy, grid = strategy_of(), grid_of()
    for number in range(1, 4):
        grid.send_and_receive(list(strategy.configure_train(number, initial(), CONFIG, grid)))
    messages = list(strategy.configure_train(4, initial(), CONFIG, grid))
    strategy.aggregate_train(4, grid.send_and_receive(messages))
    assert strategy.participations.rounds == 4


def test_every_client_checks_the_model_that_all_of_them_receive():
    strategy, grid = strategy_of(), grid_of()
    broken = {name: np.full_like(a.numpy(), np.nan) for name, a in initial().items()}
    arrays = records.to_record(broken)
    messages = list(strategy.configure_train(1, arrays, CONFIG, grid))
    with pytest.raises(InvalidValue, match="NaN or infinite values in the model after"):
        strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert len(strategy.refusals) == CLIENTS


def other_models():
    """Yield models that differ from the initial one in names, shapes or types."""
    whole = {name: array.numpy() for name, array in initial().items()}
    first = next(iter(whole))
    yield {name: array for name, array in whole.items() if name != first}
    yield {**whole, "more": np.zeros(2, np.float32)}
    yield {**whole, first: whole[first][..., :1]}
    yield {**whole, first: whole[first].astype(np.float16)}


@pytest.mark.parametrize("other", other_models(), ids=["fewer", "more", "smaller", "half"])
def test_a_run_sends_no_other_model_than_its_first(other):
    strategy, grid = strategy_of(evaluate_every=1), grid_of()
    strategy.configure_train(1, initial(), CONFIG, grid)
    for configure in (strategy.configure_train, strategy.configure_evaluate):
        with pytest.raises(InvalidValue, match="the model differs from the run's first model"):
            configure(2, records.to_record(other), CONFIG, grid)
