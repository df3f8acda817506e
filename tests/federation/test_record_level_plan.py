"""Uploads of clients of DP-Ditto and its baselines, and the trainings that the strategy refuses."""

import math

import numpy as np
import pytest
from flwr.app import ArrayRecord
from scipy import stats

from flower_ext.algorithms import APFL, Apple, DPDitto, DPFedAvg, FedALA, FedAMP, PFedMe, Scaffold
from flower_ext.algorithms.fedamp import attention
from flower_ext.data import ClientData
from flower_ext.federation import (
    FederatedStrategy,
    FederationNotReady,
    InProcessGrid,
    Sgd,
    client_app,
)
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    ClippedSteps,
    FullParticipation,
    NonPrivatePlan,
    RecordLevelPlan,
    ReleasePlan,
)
from flower_ext.training import LocalTraining, Task
from tests.support.grids import grid as grid_of
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import Net, client_data, task

CLIENTS = 4
SAMPLING = FullParticipation(CLIENTS)
FAST = LocalTraining(epochs=1, batch_size=10, learning_rate=0.1)
METHODS = (APFL, DPDitto, PFedMe, FedAMP, Apple, FedALA)
STEPS = ClippedSteps(
    learning_rate=0.1, gradient_clipping_norm=0.5, num_examples=30, local_steps=3, batch_size=10
)
every = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)


def plan(**changes):
    facts = {
        "sampling": SAMPLING,
        "clipping_norm": 1.5,
        "noise_stddev": 0.05,
        "num_examples": 30,
        "rounds": 3,
        "delta": 0.01,
    }
    return RecordLevelPlan(**{**facts, **changes})


def run(strategy, *, rounds=3, the_task=None):
    app = client_app(
        *(m.client for m in (*METHODS, DPFedAvg)), task=the_task or task(), allow_seeded_noise=True
    )
    grid = Recorder(app, num_clients=CLIENTS)
    strategy.start(grid, ArrayRecord((the_task or task()).initial_params(0)), num_rounds=rounds)
    return grid


def numbers(message):
    """Return every array in a message, of any record."""
    if not message.has_content():
        return {}
    return {
        (key, name): array.numpy()
        for key, record in message.content.array_records.items()
        for name, array in record.items()
    }


def kept(grid, names=lambda name: True):
    """Return every array that a client keeps at the end, under names that ``names`` selects."""
    return [
        array
        for context in grid.contexts.values()
        for record in context.state.array_records.values()
        for name, array in records.to_arrays(record).items()
        if names(name)
    ]


def on_the_wire(grid):
    """Return every array in any message, and every model that an update reveals."""
    for question, reply in zip(grid.sent, grid.received, strict=True):
        sent, came = numbers(question), numbers(reply)
        yield from (*sent.values(), *came.values())
        yield from (sent[records.MODEL, name] + update for (_, name), update in came.items())


def is_among(array, others):
    return any(array.shape == one.shape and np.allclose(array, one, atol=1e-6) for one in others)


@every
def test_under_a_plan_nothing_that_clients_keep_is_in_any_message(method):
    strategy = strategy_of(method, plan=plan(), local=FAST, seed=1, seeded_noise=True)
    grid = run(strategy)
    assert strategy.refusals == []
    secrets = kept(grid)
    assert len(secrets) >= CLIENTS * len(dict(Net().named_parameters()))
    assert not any(is_among(array, secrets) for array in on_the_wire(grid))


@pytest.mark.parametrize(
    ("method", "secret"),
    [
        (APFL, ""),
        (DPDitto, ""),
        (PFedMe, ""),
        (Apple, "personal"),  # APPLE shares core models
        (Apple, "relation"),
        (FedALA, "weights"),  # FedALA shares the local model
    ],
)
def test_without_privacy_personal_parameters_stay_on_the_client_as_well(method, secret):
    strategy = strategy_of(method, plan=NonPrivatePlan(sampling=SAMPLING), local=FAST, seed=1)
    grid = run(strategy)
    secrets = kept(grid, lambda name: name.startswith(secret))
    assert secrets
    assert not any(is_among(array, secrets) for array in on_the_wire(grid))


@pytest.mark.parametrize(
    "method",
    grid_of(METHODS, {DPDitto, FedAMP, Apple}.__contains__),
    ids=lambda method: method.__name__,
)
def test_every_upload_is_the_clipped_local_model_with_the_plans_noise(method):
    """With much noise on few weights: its deviation is the planned one, and not larger."""
    strategy = strategy_of(method, plan=plan(noise_stddev=3.0), local=FAST, evaluate_every=0)
    grid = run(strategy, rounds=6)
    models = []
    for question, reply in zip(grid.sent, grid.received, strict=True):
        if question.metadata.message_type.startswith("train"):
            sent, came = numbers(question), numbers(reply)
            models += [sent[records.MODEL, n] + came[records.UPDATE, n] for _, n in came]
    values = np.concatenate([model.ravel() for model in models])
    # A model within the ball of radius 1.5 adds little to the square of the noise.
    assert values.std() == pytest.approx(3.0, rel=0.1)
    assert stats.kstest(values / 3.0, "norm").pvalue > 1e-6


def spoiled(how):
    """Return the tests' data; client 1 has a record that makes training raise or diverge."""

    def data(client):
        client_examples = client_data(client)
        if client == 1 and how == "raises":
            client_examples.train.targets[3] = 99
        elif client == 1:
            client_examples.train.features[3] = math.inf
        return client_examples

    return Task(model=Net, data=data, device="cpu")


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        pytest.param("raises", None, id="raises-output"),
        pytest.param("raises", STEPS, id="raises-steps", marks=pytest.mark.full),
        pytest.param("diverges", None, id="diverges-output", marks=pytest.mark.full),
        pytest.param("diverges", STEPS, id="diverges-steps"),
    ],
)
@pytest.mark.parametrize(
    "method",
    grid_of(METHODS, {APFL, DPDitto, Apple}.__contains__),
    ids=lambda method: method.__name__,
)
def test_no_record_keeps_a_client_from_uploading_a_model_under_noise(method, how, steps):
    if steps is not None and method not in (APFL, DPDitto):
        pytest.skip("no phase of training is all of its update")
    options = {"evaluate_every": 0, "seed": 1}
    the_plan = plan(noise_stddev=1e-7, clipping_norm=100.0, steps=steps)
    strategy = strategy_of(method, plan=the_plan, local=FAST, **options)
    grid = run(strategy, rounds=2, the_task=spoiled(how))
    assert strategy.refusals == []
    replies = [m for m in grid.received if m.metadata.message_type.startswith("train")]
    assert len(replies) == 2 * CLIENTS
    # In round 1 all clients begin with the received model, and noised steps move it in any case.
    still = [max(abs(u).max() for u in numbers(m).values()) < 1e-5 for m in replies[:CLIENTS]]
    assert sum(still) == (1 if steps is None else 0)


def test_almost_without_noise_the_upload_lies_in_the_ball():
    grid = run(FederatedStrategy(DPDitto(local=FAST), plan(noise_stddev=1e-7)), rounds=2)
    norms = []
    for question, reply in zip(grid.sent, grid.received, strict=True):
        came = numbers(reply)
        if (records.UPDATE, "head.weight") in came:
            sent = numbers(question)
            parts = [sent[records.MODEL, name] + update for (_, name), update in came.items()]
            norms.append(math.sqrt(sum(float((part**2).sum()) for part in parts)))
    assert len(norms) == 2 * CLIENTS
    assert max(norms) <= 1.5 + 1e-5
    assert min(norms) > 1.4


def test_clipped_steps_move_a_model_by_no_more_than_each_record_may():
    """One full-batch step with negligible noise, on neighbouring data: within 2ηG/|D|."""
    steps = ClippedSteps(learning_rate=0.1, gradient_clipping_norm=0.5, num_examples=30)
    full = LocalTraining(epochs=1, batch_size=30, learning_rate=0.1)
    base = client_data(0).train

    def uploaded(data):
        world = Task(model=Net, data=lambda _: ClientData(train=data, test=data), device="cpu")
        the_plan = plan(noise_stddev=1e-8, clipping_norm=100.0, steps=steps)
        strategy = FederatedStrategy(DPDitto(local=full), the_plan, evaluate_every=0, seed=1)
        grid = run(strategy, rounds=1, the_task=world)
        reply = next(m for m in grid.received if (records.UPDATE, "head.bias") in numbers(m))
        return np.concatenate([update.ravel() for update in numbers(reply).values()])

    other = base.subset(np.arange(30))
    other.features[0] *= 50
    other.targets[0] = 3
    moved = float(np.linalg.norm(uploaded(base) - uploaded(other)))
    assert 0.2 * steps.sensitivity < moved <= steps.sensitivity * (1 + 1e-4)
    assert float(np.linalg.norm(uploaded(base))) <= 0.1 * 0.5 + 1e-5


def test_both_guarantees_are_printed_side_by_side():
    for the_plan in (plan(), plan(steps=STEPS)):
        strategy = FederatedStrategy(
            DPDitto(local=FAST), the_plan, seed=1, seeded_noise=True, training_loss=True
        )
        grid = run(strategy)
        published, provable = strategy.guarantees()
        assert (published.basis, provable.basis) == ("published", "provable")
        assert not published.conditions_hold
        assert "SIMULATION" in provable.statement()
        assert any("losses on training records" in text for text in provable.not_covered)
        row = strategy.run.progress.row
        assert row["epsilon_published"] == published.epsilon
        assert row["epsilon_provable"] == provable.epsilon
        assert grid.contexts


@pytest.mark.parametrize("method", [PFedMe, FedAMP, Apple, FedALA])
def test_noise_in_local_steps_is_refused_where_it_would_not_be_enough(method):
    with pytest.raises(ValueError, match=r"plan\.steps: .* uses records outside the local steps"):
        strategy_of(method, plan=plan(steps=STEPS))


@pytest.mark.parametrize("method", [DPDitto, DPFedAvg])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.2}, r"local\.learning_rate=0\.2: expected 0\.1"),
        ({"batch_size": 15}, r"local\.batch_size=15: expected 10"),
        ({"epochs": 2}, r"local\.steps=6: expected 3"),
        ({"momentum": 0.5}, r"local\.momentum=0\.5: expected 0\.0"),
        ({"sam_radius": 0.1}, r"local\.sam_radius=0\.1: expected 0\.0"),
    ],
)
def test_other_steps_than_the_plans_are_refused(method, change, message):
    training = LocalTraining(**{**vars(FAST), **change})
    with pytest.raises(ValueError, match=message):
        run(strategy_of(method, plan=plan(steps=STEPS), local=training))


@pytest.mark.parametrize("batch_size", [30, 1_000])
def test_a_batch_of_at_least_all_records_is_the_full_batch(batch_size):
    steps = ClippedSteps(learning_rate=0.1, gradient_clipping_norm=0.5, num_examples=30)
    training = LocalTraining(epochs=1, batch_size=batch_size, learning_rate=0.1)
    strategy = FederatedStrategy(DPFedAvg(local=training), plan(steps=steps), evaluate_every=0)
    run(strategy, rounds=1)
    assert strategy.run.progress.row["answered"] == CLIENTS
    assert strategy.refusals == []


def test_clients_of_another_size_than_the_plans_refuse_to_train():
    strategy = FederatedStrategy(DPDitto(local=FAST), plan(num_examples=29), seed=1)
    grid = InProcessGrid(DPDitto.client_app(task()), num_clients=CLIENTS)
    with pytest.raises(FederationNotReady, match="num_examples=29"):
        strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=1)
    assert len(strategy.refusals) == CLIENTS
    assert "training examples than the plan's num_examples=29" in strategy.refusals[0]
    assert "30" not in strategy.refusals[0]
    assert all(not context.state.array_records for context in grid.contexts.values())


def test_seeded_noise_in_steps_needs_a_client_that_allows_it():
    app = DPDitto.client_app(task())
    grid = Recorder(app, num_clients=CLIENTS)
    strategy = FederatedStrategy(DPDitto(local=FAST), plan(steps=STEPS), seed=1, seeded_noise=True)
    with pytest.raises(FederationNotReady, match="does not allow"):
        strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=1)
    assert len(strategy.refusals) == CLIENTS
    assert "does not allow" in strategy.refusals[0]


@pytest.mark.parametrize("method", [FedAMP, Apple, Scaffold])
def test_methods_whose_server_needs_single_models_take_no_release_plan(method):
    release = ReleasePlan(
        sampling=SAMPLING, clipping_norm=1.0, noise_multiplier=1.0, rounds=3, delta=0.1
    )
    with pytest.raises(ValueError, match="which a ReleasePlan hides"):
        strategy_of(method, plan=release)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: FederatedStrategy(DPDitto(global_weight=2.1), p),
            r"global_weight=2\.1: expected .* \[0, 2\]",
        ),
        (lambda p: FederatedStrategy(DPDitto(global_weight=-0.1), p), r"global_weight=-0\.1"),
        (lambda p: FederatedStrategy(DPDitto(global_weight=math.nan), p), "global_weight=nan"),
        (
            lambda p: FederatedStrategy(DPDitto(personal_training=LocalTraining(momentum=0.5)), p),
            r"personal_training\.momentum=.*: leave it out",
        ),
        (lambda p: FederatedStrategy(FedAMP(attention_width=0.0), p), r"attention_width=0\.0"),
        (lambda p: FederatedStrategy(FedAMP(attraction=-1.0), p), r"attraction=-1\.0"),
        (
            lambda p: FederatedStrategy(Apple(relation_learning_rate=0.0), p),
            r"relation_learning_rate=0\.0",
        ),
        (lambda p: FederatedStrategy(Apple(penalty=-1.0), p), r"penalty=-1\.0"),
        (lambda p: FederatedStrategy(Apple(penalty_rounds=0), p), "penalty_rounds=0"),
        (
            lambda p: FederatedStrategy(Apple(local=LocalTraining(momentum=0.5)), p),
            r"local\.momentum=.*: leave it out",
        ),
        (
            lambda p: FederatedStrategy(FedAMP(server=Sgd(learning_rate=0.5)), p),
            r"server=Sgd\(learning_rate=0\.5",
        ),
        (
            lambda p: FederatedStrategy(Apple(server=Sgd(learning_rate=0.5)), p),
            r"server=Sgd\(learning_rate=0\.5",
        ),
        (lambda p: FederatedStrategy(FedALA(adaptive=()), p), r"adaptive=\(\)"),
        (
            lambda p: FederatedStrategy(FedALA(weight_learning_rate=0.0), p),
            r"weight_learning_rate=0\.0",
        ),
        (lambda p: FederatedStrategy(FedALA(sample_fraction=1.1), p), r"sample_fraction=1\.1"),
        (lambda p: FederatedStrategy(FedALA(first_passes=0), p), "first_passes=0"),
    ],
)
def test_bad_settings_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make(plan())


@pytest.mark.parametrize("adaptive", [("classifier",), ("head", "heads")])
def test_adaptive_modules_the_model_lacks_end_the_run_at_once(adaptive):
    grid = Recorder(FedALA.client_app(task()), num_clients=CLIENTS)
    strategy = FederatedStrategy(FedALA(adaptive=adaptive, local=FAST), plan())
    message = rf"adaptive='{adaptive[-1]}' names no parameter .* \['extractor', 'head'\]"
    with pytest.raises(ValueError, match=message):
        strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=3)
    assert grid.sent == []


def test_bytes_are_those_of_what_each_method_sends():
    """FedAMP sends one model per client, APPLE as many as there are clients; all upload one."""
    down, up = {}, {}
    for method in (DPDitto, FedAMP, Apple):
        strategy = strategy_of(
            method, plan=NonPrivatePlan(sampling=SAMPLING), local=FAST, evaluate_every=0
        )
        run(strategy, rounds=2)
        down[method], up[method] = (
            strategy.run.progress.row[f"bytes_{way}"] for way in ("down", "up")
        )
    assert down[FedAMP] == down[DPDitto]
    assert down[Apple] == CLIENTS * down[DPDitto]
    assert up[FedAMP] == up[Apple] == up[DPDitto] == down[DPDitto]


def test_each_client_gets_its_cloud_model_and_all_others_core_models():
    grid = run(
        FederatedStrategy(FedAMP(local=FAST), NonPrivatePlan(sampling=SAMPLING), evaluate_every=0)
    )
    last = [m for m in grid.sent if m.metadata.message_type.startswith("train")][-CLIENTS:]
    clouds = [numbers(m)[records.MODEL, "head.weight"] for m in last]
    assert len({cloud.tobytes() for cloud in clouds}) == CLIENTS
    grid = run(
        FederatedStrategy(Apple(local=FAST), NonPrivatePlan(sampling=SAMPLING), evaluate_every=0)
    )
    last = [m for m in grid.sent if m.metadata.message_type.startswith("train")][-CLIENTS:]
    for client, message in enumerate(last):
        expected = {records.MODEL} | {f"core.{j}" for j in range(CLIENTS) if j != client}
        assert set(message.content.array_records) == expected
        other = numbers(last[(client + 1) % CLIENTS])
        assert np.array_equal(
            numbers(message)[records.MODEL, "head.bias"], other[f"core.{client}", "head.bias"]
        )


def test_fedamps_attention_grows_with_likeness_and_every_row_adds_up_to_one():
    models = np.array([[0.0, 0.0], [0.1, 0.0], [3.0, 0.0]])
    weights = attention(models, width=1.0, population=3)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    np.testing.assert_allclose(weights, weights.T)
    assert weights[0, 1] > weights[0, 2] > 0
    assert weights[0, 1] == pytest.approx(math.exp(-0.01) / 3)
    assert (np.diag(weights) >= 0).all()
