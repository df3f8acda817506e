"""FedPer equals a plain loop over models, and refuses what it cannot protect."""

import pytest

from flower_ext.algorithms import FedPer
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.privacy import ClippedSteps, FullParticipation, RecordLevelPlan
from flower_ext.training import evaluate
from tests.support.personalised import (
    CLIENTS,
    ROUNDS,
    SEED,
    SGD,
    OneByOne,
    assert_close,
    run,
    uneven_data,
    uneven_task,
)
from tests.support.reference.personalised import federated, jointly


@pytest.mark.parametrize("grid", [InProcessGrid, OneByOne])
def test_it_equals_the_plain_loop_and_evaluates_the_whole_personal_model(grid):
    shared, memories, strategy, _ = run(FedPer(local=SGD), grid=grid)
    expected, models, _ = federated(
        jointly,
        uneven_task(),
        seed=SEED,
        clients=CLIENTS,
        rounds=ROUNDS,
        is_personal=lambda name: name.startswith("head"),
        local=SGD,
    )
    assert strategy.refusals == []
    assert_close(shared, expected)
    assert set(memories) == set(range(CLIENTS))
    for client, memory in memories.items():
        assert_close(
            memory, {f"head.{n}": p.detach() for n, p in models[client].head.named_parameters()}
        )
        score = evaluate(uneven_task(), {**shared, **memory}, uneven_data(client).test)["loss"]
        assert strategy.run.client_metrics[client]["loss"] == pytest.approx(score, abs=1e-6)


def test_without_a_personal_part_it_is_refused():
    with pytest.raises(ValueError, match=r"personal=\(\): expected the names of FedPer's"):
        FedPer(personal=())


def test_noise_in_local_steps_is_refused_because_personal_layers_enter_the_upload():
    steps = ClippedSteps(
        learning_rate=0.2, gradient_clipping_norm=0.5, num_examples=30, local_steps=8, batch_size=8
    )
    plan = RecordLevelPlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=1.0,
        noise_stddev=0.1,
        num_examples=30,
        rounds=3,
        delta=0.01,
        steps=steps,
    )
    with pytest.raises(
        ValueError,
        match=r"plan\.steps: expected None, because FedPer also uses records outside",
    ):
        FederatedStrategy(FedPer(local=SGD), plan)
