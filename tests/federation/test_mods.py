"""Record-level protection of ClientApps that do not use this package."""

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn

from flower_ext.federation import (
    InProcessGrid,
    objective_perturbation_term,
    output_perturbation_mod,
)
from flower_ext.federation.failures import STAYS_THERE, ClientFailed
from flower_ext.privacy import (
    ObjectivePerturbation,
    OutputPerturbation,
    SecureNoise,
    SeededNoise,
)

TIGHT = OutputPerturbation(clipping_norm=1.0, noise_stddev=1e-9)
METRICS = {"num-examples": 7, "loss": 0.25}


def sent_arrays() -> dict[str, dict[str, np.ndarray]]:
    """Return two array records of norms 5 and 12, together 13, in two precisions."""
    return {
        "arrays": {"w": np.array([[3.0, 0.0]], np.float32), "b": np.array([4.0], np.float32)},
        "extra": {"w": np.full(144, 1.0)},
    }


def content(arrays=None, **more) -> RecordDict:
    kept = {
        key: ArrayRecord({name: Array(array) for name, array in named.items()})
        for key, named in (sent_arrays() if arrays is None else arrays).items()
    }
    return RecordDict({**kept, "metrics": MetricRecord(METRICS), **more})


def app_that_sends(arrays=None, perturbation=TIGHT, noise=SecureNoise) -> ClientApp:
    """Return a plain Flower app behind the mod, which sends the same in training and evaluation."""
    app = ClientApp(mods=[output_perturbation_mod(perturbation, noise)])

    def answer(message: Message, context: Context) -> Message:
        facts = ConfigRecord({"version": "1.2"})
        return Message(content(arrays, facts=facts), reply_to=message)

    app.train()(answer)
    app.train("special")(answer)
    app.evaluate()(answer)
    app.query()(answer)
    return app


def ask(app: ClientApp, kind: str = "train") -> Message:
    grid = InProcessGrid(app, num_clients=1)
    (node,) = grid.get_node_ids()
    message = Message(RecordDict(), dst_node_id=node, message_type=kind, group_id="1")
    (reply,) = grid.send_and_receive([message])
    return reply


def flat(reply: Message) -> np.ndarray:
    records = reply.content.array_records
    return np.concatenate(
        [records[k][n].numpy().ravel() for k in sorted(records) for n in records[k]]
    )


def unprotected() -> np.ndarray:
    arrays = sent_arrays()
    return np.concatenate([a.ravel() for key in sorted(arrays) for a in arrays[key].values()])


@pytest.mark.parametrize("kind", ["train", "train.special"])
def test_all_arrays_of_a_training_reply_are_clipped_as_one_vector(kind):
    reply = ask(app_that_sends(), kind)
    np.testing.assert_allclose(flat(reply), unprotected() / 13.0, atol=1e-6)
    assert np.linalg.norm(flat(reply)) == pytest.approx(1.0, abs=1e-6)


def test_names_shapes_precisions_and_everything_else_in_a_reply_stay():
    reply = ask(app_that_sends())
    for key, named in sent_arrays().items():
        record = reply.content.array_records[key]
        assert list(record) == list(named)
        for name, array in named.items():
            assert record[name].numpy().dtype == array.dtype
            assert record[name].numpy().shape == array.shape
    assert set(reply.content.array_records) == {"arrays", "extra"}
    assert dict(reply.content.metric_records["metrics"]) == METRICS
    assert reply.content.config_records["facts"]["version"] == "1.2"


def test_every_array_carries_noise_of_the_stddev_asked_for():
    arrays = {"arrays": {"w": np.zeros(5_000, np.float32)}, "extra": {"w": np.zeros((50, 100))}}
    perturbation = OutputPerturbation(clipping_norm=1.0, noise_stddev=0.7)
    reply = ask(app_that_sends(arrays, perturbation))
    for key in arrays:
        noise = reply.content.array_records[key]["w"].numpy()
        assert noise.std() == pytest.approx(0.7, rel=0.06)
    both = [reply.content.array_records[key]["w"].numpy().ravel() for key in arrays]
    assert abs(np.corrcoef(both)[0, 1]) < 0.1


def test_noise_is_fresh_in_every_reply_and_comes_from_the_source_that_was_named():
    app = app_that_sends(perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=1.0))
    assert not np.array_equal(flat(ask(app)), flat(ask(app)))
    seeded = [
        ask(app_that_sends(noise=lambda: SeededNoise(4), perturbation=TIGHT)) for _ in range(2)
    ]
    np.testing.assert_array_equal(flat(seeded[0]), flat(seeded[1]))
    source = SeededNoise(4, "one source for all rounds")
    wide = OutputPerturbation(clipping_norm=1.0, noise_stddev=1.0)
    again = app_that_sends(noise=lambda: source, perturbation=wide)
    assert not np.array_equal(flat(ask(again)), flat(ask(again)))


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_replies_that_are_not_of_training_pass_as_they_are(kind):
    np.testing.assert_array_equal(flat(ask(app_that_sends(), kind)), unprotected())


def through_the_mod(reply_of) -> Message:
    """Return the reply that the mod makes of another, called as Flower calls it."""
    grid = InProcessGrid(app_that_sends(), num_clients=1)
    (node,) = grid.get_node_ids()
    message = Message(RecordDict(), dst_node_id=node, message_type="train", group_id="1")
    mod = output_perturbation_mod(TIGHT)
    return mod(message, grid.contexts[node], lambda message, context: reply_of(message))


def test_replies_with_an_error_pass_as_they_are():
    reply = through_the_mod(lambda m: Message(Error(code=7, reason="no data today"), reply_to=m))
    assert reply.has_error()
    assert (reply.error.code, reply.error.reason) == (7, "no data today")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.arange(3), "'extra/n' has dtype int64"),
        (np.array([1.0, np.nan]), "'extra/n' holds NaN"),
        (np.array([np.inf]), "'extra/n' holds NaN or infinite"),
    ],
)
def test_what_cannot_be_noised_is_said_in_the_clients_log_and_nothing_leaves(array, said, caplog):
    arrays = {**sent_arrays(), "extra": {"n": array}}
    with pytest.raises(ClientFailed) as error:
        through_the_mod(lambda m: Message(content(arrays), reply_to=m))
    assert "extra" not in str(error.value)
    assert said in caplog.text
    reply = ask(app_that_sends(arrays))
    assert reply.has_error()
    assert not reply.has_content()
    assert reply.error.reason == STAYS_THERE


def test_flowers_own_strategies_average_what_the_mod_lets_out():
    """FedAvg on a foreign app: three clients send norm 13, and their mean model has norm 1."""
    arrays = {"arrays": sent_arrays()["extra"]}
    grid = InProcessGrid(app_that_sends(arrays), num_clients=3)
    strategy = FedAvg(min_train_nodes=3, min_available_nodes=3, fraction_evaluate=0.0)
    start = ArrayRecord({"w": Array(np.zeros(144))})
    model = strategy.start(grid, start, num_rounds=1).arrays["w"].numpy()
    np.testing.assert_allclose(model, np.full(144, 1 / 12), atol=1e-6)


# Objective perturbation in a training loop of one's own -----------------------------------------


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1).double()


X = torch.tensor([[0.1, 0.2, 0.3], [-0.5, 0.4, 0.0], [0.3, -0.3, 0.6]]).double()
Y = torch.tensor([[1.0], [0.0], [1.0]]).double()


def strongly_convex_loss(net: nn.Module) -> torch.Tensor:
    squares = sum(p.square().sum() for p in net.parameters())
    return nn.functional.mse_loss(net(X), Y) + 0.5 * squares


def test_the_term_in_a_plain_training_loop_moves_the_optimum_until_the_slope_is_minus_the_noise():
    net = model()
    term = objective_perturbation_term(
        dict(net.named_parameters()), ObjectivePerturbation(rate=1.5), SeededNoise(3)
    )
    optimiser = torch.optim.SGD(net.parameters(), lr=0.3)
    for _ in range(300):
        optimiser.zero_grad()
        (strongly_convex_loss(net) + term(dict(net.named_parameters()))).backward()
        optimiser.step()
    optimiser.zero_grad()
    strongly_convex_loss(net).backward()
    like = {name: p.detach().numpy() for name, p in net.named_parameters()}
    noise = ObjectivePerturbation(rate=1.5).direction(like, SeededNoise(3))
    for name, p in net.named_parameters():
        np.testing.assert_allclose(p.grad.numpy(), -noise[name], atol=1e-8)
    assert sum(float(np.abs(part).sum()) for part in noise.values()) > 0.1


def test_one_term_is_the_same_all_round_and_the_next_is_another():
    params = dict(model().named_parameters())
    first, second = (
        objective_perturbation_term(params, ObjectivePerturbation(rate=1.0)) for _ in range(2)
    )
    assert float(first(params)) == float(first(params))
    assert float(first(params)) != float(second(params))


def test_a_term_has_the_precision_of_the_parameters_and_needs_floats():
    term = objective_perturbation_term(
        {"w": torch.zeros(4, 2)}, ObjectivePerturbation(rate=1.0), SeededNoise(1)
    )
    assert term.direction["w"].dtype == torch.float32
    assert term.direction["w"].shape == (4, 2)
    with pytest.raises(TypeError, match="'steps' has dtype"):
        objective_perturbation_term({"steps": torch.tensor([3])}, ObjectivePerturbation(rate=1.0))


def test_the_mod_noises_a_scalar_array():
    reply = ask(app_that_sends({"arrays": {"t": np.array(3.0, np.float32), "w": np.ones(2)}}))
    assert not reply.has_error(), reply.error.reason
    assert reply.content.array_records["arrays"]["t"].numpy().shape == ()


def test_the_mod_keeps_arrays_apart_whatever_their_record_names():
    arrays = {"a": {"b/c": np.zeros(2)}, "a/b": {"c": np.ones(2)}}
    reply = ask(app_that_sends(arrays))
    np.testing.assert_allclose(reply.content.array_records["a"]["b/c"].numpy(), 0.0, atol=1e-6)


def test_a_training_reply_without_arrays_passes_the_mod():
    reply = through_the_mod(
        lambda m: Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=m)
    )
    assert reply.has_content()
