"""Client-level privacy, by a mod, of ClientApps that do not use this package."""

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

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation import (
    ClientMethod,
    FederatedStrategy,
    FederationNotReady,
    InProcessGrid,
    LocalResult,
    Memory,
    client_level_dp_mod,
    records,
)
from flower_ext.federation.protection import to_entries
from flower_ext.federation.roster import FOR_MODS
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    PoissonSampling,
    ReleasePlan,
    SecureScores,
    SecureSum,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, ProtectedByServer
from flower_ext.training import Task, UnshareableModel
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder

CLIENTS = 4
SECRET = "record 17 is Anna's"
START = {"w": np.full((2, 3), 0.5, np.float32), "t": np.array(-1.0, np.float32)}
LOUD = {"num-examples": 7, "loss": 0.25}


def moved(model, partition: int):
    """Return the result of one training that this package's and a foreign ClientApp share."""
    return {name: value + (partition + 1.0) for name, value in model.items()}


def foreign_app(train=moved, *, mods=None, more=None) -> ClientApp:
    """Return a ClientApp as in Flower's tutorials, whose reply also has uncovered content."""
    app = ClientApp(mods=[client_level_dp_mod(allow_seeded_noise=True)] if mods is None else mods)

    @app.train()
    def _(message: Message, context: Context) -> Message:
        received = {n: a.numpy() for n, a in message.content["arrays"].items()}
        model = train(received, context.node_config.get("partition-id", 0))
        content = {
            "arrays": ArrayRecord({n: Array(np.asarray(a)) for n, a in model.items()}),
            "metrics": MetricRecord(LOUD),
            **(more or {}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord(LOUD)}), reply_to=message)

    return app


def plan(**changes) -> ReleasePlan:
    facts = {
        "sampling": FullParticipation(CLIENTS),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 2,
        "delta": 1e-5,
    }
    return ReleasePlan(**{**facts, **changes})


def start() -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in START.items()})


def run(app: ClientApp, strategy=None, rounds: int = 2, grid=None):
    strategy = strategy or FederatedStrategy(DPFedAvg(), plan(), evaluate_every=0)
    grid = grid or Recorder(app, num_clients=CLIENTS)
    return strategy.start(grid, start(), num_rounds=rounds), strategy, grid


def replies_of_training(grid, *, rehearsal=False):
    """Return the replies of rounds, or those of the rehearsal, which are zeros."""
    return [
        m
        for m in grid.received
        if m.metadata.message_type == "train"
        and m.content
        and "identity" not in m.content
        and rehearsal == is_zero(m.content.get(records.UPDATE, {}))
    ]


def is_zero(update) -> bool:
    return bool(update) and not any(array.numpy().any() for array in update.values())


# In a run ---------------------------------------------------------------------------------------


class Ours(DPFedAvg):
    """The client side of this package, with the same training."""

    client = ClientMethod(
        name="moves",
        local_update=lambda work: LocalResult(
            model=moved(work.received, int(work.data.train.features[0]))
        ),
        local_model=lambda work: work.received,
        memory=Memory.NONE,
        upload_phase="local",
    )


class Shaped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(START["w"]))
        self.t = torch.nn.Parameter(torch.tensor(START["t"]))


def our_app() -> ClientApp:
    def data(partition: int) -> ClientData:
        one = Examples(torch.tensor([[float(partition)]]), torch.zeros(1))
        return ClientData(train=one, test=one)

    task = Task(model=Shaped, data=data, metrics={}, device="cpu")
    return Ours.client_app(task, allow_seeded_noise=True)


@pytest.mark.parametrize("sampling", [FullParticipation(CLIENTS), PoissonSampling(CLIENTS, 0.6)])
def test_a_foreign_app_with_the_mod_sends_our_client_sides_exact_bits(sampling):
    seeded = {"plan": plan(sampling=sampling), "seed": 5, "seeded_noise": True, "evaluate_every": 0}
    foreign, _, _ = run(foreign_app(), strategy_of(DPFedAvg, **seeded))
    ours, _, _ = run(our_app(), strategy_of(Ours, **seeded))
    for name in START:
        assert not np.array_equal(foreign.arrays[name].numpy(), START[name])
        np.testing.assert_array_equal(foreign.arrays[name].numpy(), ours.arrays[name].numpy())


def test_nothing_but_the_noised_update_leaves_the_client():
    more = {"extra": ArrayRecord([np.ones(3)]), "facts": ConfigRecord({"said": SECRET})}
    _, strategy, grid = run(foreign_app(more=more))
    sent = replies_of_training(grid)
    assert len(sent) == 2 * CLIENTS
    assert strategy.refusals == []
    (rehearsed,) = replies_of_training(grid, rehearsal=True)
    for reply in [*sent, rehearsed]:
        assert set(reply.content) == {records.UPDATE}
        assert set(reply.content[records.UPDATE]) == set(START)


def test_the_run_is_accounted_as_with_clients_of_this_package():
    _, foreign, _ = run(foreign_app())
    _, ours, _ = run(our_app(), FederatedStrategy(Ours(), plan(), evaluate_every=0))
    assert [g.to_dict() for g in foreign.guarantees()] == [g.to_dict() for g in ours.guarantees()]
    assert all(np.isfinite(g.epsilon) for g in foreign.guarantees() if g.basis == "provable")


def test_a_foreign_apps_memory_is_an_assumption_for_fixed_cohort_sizes():
    _, strategy, _ = run(
        foreign_app(),
        FederatedStrategy(
            DPFedAvg(), plan(sampling=FixedSizeSampling(CLIENTS, 2)), evaluate_every=0
        ),
    )
    (models,) = [g for g in strategy.guarantees() if g.view is AdversaryView.RELEASED_MODELS][-1:]
    assert any("ClientApp of somebody else" in text for text in models.assumptions)


def test_every_round_has_fresh_secure_noise_unless_the_server_sends_a_seed():
    first, second = (run(foreign_app())[0].arrays["w"].numpy() for _ in range(2))
    assert not np.array_equal(first, second)


def test_without_the_mod_a_run_is_refused_before_any_client_trains():
    trained = []

    def train(received, partition):
        trained.append(partition)
        return received

    with pytest.raises(FederationNotReady, match=r"mods=\[flower_ext.federation.client_level_dp"):
        run(foreign_app(train, mods=[]))
    assert trained == []


SUMS = SecureSum(colluding=0.0, dropouts=0.0)
ADAPTIVE = AdaptiveClipping(initial_norm=0.5, count_noise_stddev=0.9)


@pytest.mark.parametrize("norm", [0.5, ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_foreign_app_in_a_secure_sum_gives_our_client_sides_model(norm):
    planned = plan(noise_placement=SUMS, clipping_norm=norm)
    seeded = {"plan": planned, "seed": 5, "seeded_noise": True, "evaluate_every": 0}
    foreign, strategy, grid = run(foreign_app(), strategy_of(DPFedAvg, **seeded))
    ours, _, _ = run(our_app(), strategy_of(Ours, **seeded))
    assert strategy.refusals == []
    for name in START:
        assert not np.array_equal(foreign.arrays[name].numpy(), START[name])
        np.testing.assert_array_equal(foreign.arrays[name].numpy(), ours.arrays[name].numpy())
    # Beside the rehearsal and the identity, only bytes of the protocol leave a client.
    for reply in grid.received[2 + CLIENTS + 1 :]:
        ((record, arrays),) = reply.content.items()
        assert record in (records.ANSWER, records.UPDATE)
        assert list(arrays) == ["message"]


@pytest.mark.parametrize("name", ["raises", "NaN"])
def test_an_odd_client_in_a_secure_sum_masks_an_update_of_zeros(name):
    def train(received, partition):
        if partition == 1 and name == "raises":
            raise ValueError(SECRET)
        step = moved(received, partition)
        return {n: v * np.nan for n, v in step.items()} if partition == 1 else step

    def still(received, partition):
        return received if partition == 1 else moved(received, partition)

    seeded = {"plan": plan(noise_placement=SUMS), "seed": 5, "seeded_noise": True}
    odd, expected = (
        run(foreign_app(how), strategy_of(DPFedAvg, **seeded, evaluate_every=0))[0].arrays
        for how in (train, still)
    )
    for name in START:
        np.testing.assert_array_equal(odd[name].numpy(), expected[name].numpy())


def test_queries_under_noise_are_refused_before_any_client_trains():
    trained = []

    def train(received, partition):
        trained.append(partition)
        return received

    queries = (SecureScores(noise_multiplier=5.0, times=1),)
    strategy = FederatedStrategy(DPFedAvg(), plan(noise_placement=SUMS, queries=queries))
    with pytest.raises(ValueError, match="cannot answer a query with noise"):
        run(foreign_app(train), strategy)
    assert trained == []


def test_an_app_that_answers_anything_is_not_taken_for_one_with_mod():
    app = ClientApp()

    @app.train()
    def _(message: Message, context: Context) -> Message:
        return Message(message.content, reply_to=message)

    with pytest.raises(FederationNotReady, match="client_level_dp_mod"):
        run(app)


def test_a_mod_for_records_or_nothing_does_not_count_as_client_level():
    perturbation = OutputPerturbation(clipping_norm=1.0, noise_stddev=1.0)
    record_level = PerturbationPlan(
        sampling=FullParticipation(CLIENTS), perturbation=perturbation, delta=1e-5
    )
    with pytest.raises(FederationNotReady, match="does not know how") as error:
        run(foreign_app(), FederatedStrategy(DPFedAvg(), record_level, evaluate_every=0))
    assert "client_level_dp_mod" not in str(error.value)


def test_a_simulation_asks_one_node_for_a_mod_that_is_missing():
    grid = Recorder(foreign_app(mods=[]), num_clients=CLIENTS)
    with pytest.raises(FederationNotReady):
        run(None, grid=grid)
    assert [m.metadata.message_type for m in grid.received] == ["query.identity", "train"]
    assert not any(list(m.content.array_records) for m in grid.sent)


def test_nodes_without_a_partition_take_part_and_are_numbered_by_their_ids():
    grid = Recorder(foreign_app(mods=[client_level_dp_mod()]), num_clients=CLIENTS)
    for context in grid.contexts.values():
        context.node_config = {}
    _, strategy, _ = run(None, grid=grid)
    assert strategy.refusals == []
    assert not strategy.run.clients.roster.known


def test_where_the_server_noises_the_mod_lets_models_through():
    _, strategy, grid = run(
        foreign_app(),
        FederatedStrategy(DPFedAvg(), plan(noise_placement="server"), evaluate_every=0),
    )
    assert strategy.refusals == []
    for reply in replies_of_training(grid):
        assert set(reply.content) == {"arrays", "metrics"}


def test_evaluation_passes_the_mod_as_it_is():
    result, _, _ = run(foreign_app(), FederatedStrategy(DPFedAvg(), plan()))
    assert result.evaluate_metrics_clientapp[1]["loss_mean"] == 0.25


def with_floor(app, least: float):
    grid = Recorder(app, num_clients=CLIENTS)
    for context in grid.contexts.values():
        context.node_config["least-noise-multiplier"] = least
    return grid


@pytest.mark.parametrize("placement", ["client", "server"])
def test_the_owners_least_noise_holds_and_the_server_learns_why(placement):
    strategy = FederatedStrategy(DPFedAvg(), plan(noise_placement=placement), evaluate_every=0)
    with pytest.raises(FederationNotReady, match="least-noise-multiplier=0.6"):
        run(None, strategy, grid=with_floor(foreign_app(), 0.6))  # σ/√4 = 0.5


def test_a_node_that_requires_secure_sums_answers_nothing_by_the_mod():
    """The downgrade: an app with the mod, whose uploads no sum hides."""
    grid = Recorder(foreign_app(), num_clients=CLIENTS)
    for context in grid.contexts.values():
        context.node_config["require-secure-sum"] = True
    strategy = FederatedStrategy(DPFedAvg(), plan(), evaluate_every=0)
    with pytest.raises(FederationNotReady, match="require-secure-sum"):
        run(None, strategy, grid=grid)
    received = ArrayRecord({"w": torch.zeros(2)})
    strategy = FederatedStrategy(DPFedAvg(), plan())
    questions = [
        Message(RecordDict({"arrays": received}), dst_node_id=node, message_type="evaluate")
        for node in grid.get_node_ids()
    ]
    replies = [*grid.send_and_receive(questions)]
    assert len(replies) == CLIENTS
    assert all("require-secure-sum" in reply.error.reason for reply in replies)


def test_a_node_that_requires_secure_sums_trains_in_no_rehearsal():
    rounds = []

    def train(received, partition):
        rounds.append(partition)
        return moved(received, partition)

    grid = Recorder(foreign_app(train), num_clients=CLIENTS)
    for context in grid.contexts.values():
        context.node_config |= {"require-secure-sum": True, "least-sum-members": CLIENTS}
    strategy = FederatedStrategy(DPFedAvg(), plan(noise_placement=SUMS), evaluate_every=0)
    _, strategy, _ = run(None, strategy, grid=grid)
    assert strategy.refusals == []
    assert len(rounds) == 2 * CLIENTS


def test_a_share_of_a_sums_noise_never_leaves_without_masks():
    share = ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-20)
    reply = ask(START, START, share)
    assert "without a secure sum" in reply.error.reason


def test_diagnostics_beside_a_sum_are_refused_where_the_owner_requires_sums():
    grid = Recorder(foreign_app(), num_clients=CLIENTS)
    for context in grid.contexts.values():
        context.node_config["require-secure-sum"] = True
    strategy = strategy_of(
        DPFedAvg, plan=plan(noise_placement=SUMS), diagnostics=True, evaluate_every=0
    )
    with pytest.raises(FederationNotReady, match="require-secure-sum"):
        run(None, strategy, grid=grid)


def test_a_floor_that_is_met_changes_nothing():
    _, strategy, _ = run(None, grid=with_floor(foreign_app(), 0.5))
    assert strategy.refusals == []


def test_seeded_noise_is_refused_unless_the_app_was_built_for_simulation():
    strategy = FederatedStrategy(DPFedAvg(), plan(), seed=1, seeded_noise=True, evaluate_every=0)
    with pytest.raises(FederationNotReady, match="seeded noise"):
        run(foreign_app(mods=[client_level_dp_mod()]), strategy)


def test_the_mod_fails_closed_before_a_server_that_asks_for_no_protection():
    with pytest.raises(FederationNotReady, match="protection that a ReleasePlan asks for"):
        run(
            foreign_app(),
            FederatedStrategy(DPFedAvg(), NonPrivatePlan(sampling=FullParticipation(CLIENTS))),
        )
    trained = []
    app = foreign_app(lambda received, partition: trained.append(partition) or received)
    fedavg = FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS, fraction_evaluate=0.0)
    result = fedavg.start(InProcessGrid(app, CLIENTS), start(), num_rounds=1)
    assert trained == []
    assert result.arrays is None or not result.train_metrics_clientapp


def test_the_app_sees_what_flowers_strategies_send():
    seen = []
    app = ClientApp(mods=[client_level_dp_mod()])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        seen.append((set(message.content), message.content["config"]["lr"]))
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    strategy = FederatedStrategy(DPFedAvg(), plan(), evaluate_every=0)
    strategy.start(
        InProcessGrid(app, CLIENTS), start(), num_rounds=1, train_config=ConfigRecord({"lr": 0.1})
    )
    rehearsal = 1
    assert seen == [({"arrays", "config"}, 0.1)] * (rehearsal + CLIENTS)
    assert strategy.refusals == []


def test_personal_layers_stay_on_the_client_though_the_app_returns_them():
    """Examples are BatchNorm's statistics and counters, which the server refuses to share."""

    def train(received, partition):
        assert set(received) == {"w", "t"}
        return {**moved(received, partition), "bn.running_mean": np.ones(2), "bn.n": np.array(3)}

    whole = ArrayRecord(
        {**start(), "bn.running_mean": Array(np.zeros(2)), "bn.n": Array(np.array(0))}
    )
    grid = Recorder(foreign_app(train), num_clients=CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(personal=["bn"]), plan(), evaluate_every=0)
    strategy.start(grid, whole, num_rounds=1)
    assert strategy.refusals == []
    assert set(replies_of_training(grid)[0].content[records.UPDATE]) == {"w", "t"}
    with pytest.raises(UnshareableModel):
        FederatedStrategy(DPFedAvg(), plan(), evaluate_every=0).start(grid, whole, num_rounds=1)


# Among other mods ---------------------------------------------------------------------------------


def reads_round(message, context, call_next):
    """Read what every training of Flower has, as a mod that logs does."""
    if message.metadata.message_type == "train":
        assert message.content["config"]["server-round"] in (0, 1, 2)
    return call_next(message, context)


def reads_metrics(message, context, call_next):
    reply = call_next(message, context)
    if reply.has_content() and message.metadata.message_type == "train":
        assert reply.content["metrics"]["num-examples"] == LOUD["num-examples"]
    return reply


def halves(message, context, call_next):
    """Compress what leaves the client, which the server cannot read then."""
    reply = call_next(message, context)
    for name, record in list(reply.content.array_records.items()):
        half = {key: Array(array.numpy().astype(np.float16)) for key, array in record.items()}
        reply.content[name] = ArrayRecord(half)
    return reply


def mods_of(before=(), after=()):
    return [*before, client_level_dp_mod(allow_seeded_noise=True), *after]


def test_mods_after_ours_see_a_plain_app_and_earlier_mods_the_settings():
    for mods in (mods_of(after=[reads_round, reads_metrics]), mods_of(before=[reads_round])):
        _, strategy, _ = run(foreign_app(mods=mods))
        assert strategy.refusals == []
        assert strategy.participations.rounds == 2


@pytest.mark.parametrize("before", [reads_metrics, halves])
def test_an_earlier_mod_that_spoils_uploads_ends_the_run_without_spend(before):
    strategy = FederatedStrategy(DPFedAvg(), plan(), evaluate_every=0)
    with pytest.raises(FederationNotReady, match=r"with that mod before all others|put .* first"):
        run(foreign_app(mods=mods_of(before=[before])), strategy)
    assert strategy.participations.rounds == 0
    assert strategy.guarantees() == []


# What a client's data may do --------------------------------------------------------------------


def fails(received, partition):
    raise ValueError(SECRET)


def sends(change):
    def train(received, partition):
        return {**moved(received, partition), **change(received)}

    return train


ODD = {
    "raises": fails,
    "NaN": sends(lambda r: {"w": np.full_like(r["w"], np.nan)}),
    "infinite": sends(lambda r: {"t": np.array(np.inf, np.float32)}),
    "another shape": sends(lambda r: {"w": r["w"][:1]}),
    "another type": sends(lambda r: {"w": r["w"].astype(np.float64)}),
    "an array less": lambda r, p: {"w": r["w"]},
    "no array": lambda r, p: {},
    "unreadable": None,
    "an error": None,
}


def odd_app(name: str) -> ClientApp:
    """Return a ClientApp in which only partition 1 does something odd."""

    def train(received, partition):
        return (ODD[name] if partition == 1 else moved)(received, partition)

    if ODD[name] is not None:
        return foreign_app(train)
    app = ClientApp(mods=[client_level_dp_mod(allow_seeded_noise=True)])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        partition = context.node_config["partition-id"]
        received = {n: a.numpy() for n, a in message.content["arrays"].items()}
        model = moved(received, partition)
        content = RecordDict(
            {"arrays": ArrayRecord({n: Array(np.asarray(a)) for n, a in model.items()})}
        )
        if partition == 1 and name == "an error":
            return Message(Error(code=7, reason=SECRET), reply_to=message)
        if partition == 1:
            content["arrays"]["w"].data = SECRET.encode()
        return Message(content, reply_to=message)

    return app


@pytest.mark.parametrize("name", ODD)
def test_an_odd_client_sends_an_unlearned_update_and_changes_no_other(name):
    def uploads(app):
        grid = Recorder(app, num_clients=CLIENTS)
        strategy = FederatedStrategy(
            DPFedAvg(), plan(), seed=2, seeded_noise=True, evaluate_every=0
        )
        strategy.start(grid, start(), num_rounds=1)
        assert strategy.refusals == []
        return {m.metadata.src_node_id: m.content for m in replies_of_training(grid)}

    def still(received, partition):
        return received if partition == 1 else moved(received, partition)

    expected, found = uploads(foreign_app(still)), uploads(odd_app(name))
    assert found.keys() == expected.keys()
    for node, content in found.items():
        assert content.keys() == expected[node].keys()
        for key, array in content[records.UPDATE].items():
            other = expected[node][records.UPDATE][key]
            np.testing.assert_array_equal(array.numpy(), other.numpy())


# One message ------------------------------------------------------------------------------------

TIGHT = ClipAndNoise(clipping_norm=1.0, noise_stddev=1e-6)


def ask(model, returned, protection=TIGHT, **facts) -> Message:
    """Return the answer of a client behind the mod to one message of a round."""
    app = foreign_app(lambda received, partition: returned)
    grid = InProcessGrid(app, num_clients=1)
    (node,) = grid.get_node_ids()
    told = {"number": 1, "seed": 0, **to_entries(protection, seeded_noise=False), **facts}
    content = {
        records.MODEL: ArrayRecord({n: Array(a) for n, a in model.items()}),
        records.CONFIG: ConfigRecord({f"{FOR_MODS}{name}": value for name, value in told.items()}),
    }
    message = Message(RecordDict(content), dst_node_id=node, message_type="train", group_id="1")
    (reply,) = grid.send_and_receive([message])
    return reply


def update_of(reply: Message):
    assert not reply.has_error(), reply.error.reason
    return {n: a.numpy() for n, a in reply.content[records.UPDATE].items()}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_floating_point_arrays_are_clipped_as_one_vector_in_their_precision(dtype):
    model = {"w": np.zeros(144, dtype), "t": np.array(0.0, dtype)}
    returned = {"w": np.full(144, 1.0, dtype), "t": np.array(5.0, dtype)}
    update = update_of(ask(model, returned))
    assert update["t"].shape == ()
    assert all(array.dtype == dtype for array in update.values())
    np.testing.assert_allclose(update["t"], 5 / 13, rtol=2e-3)
    np.testing.assert_allclose(update["w"], np.full(144, 1 / 13), rtol=2e-3)


def test_half_precision_is_refused_by_name_before_training_even_among_others():
    model = {"v": np.zeros(2, np.float32), "w": np.zeros(4, np.float16)}
    reply = ask(model, model)
    assert reply.has_error()
    assert "'w' has dtype float16" in reply.error.reason
    assert "expected float32 or float64" in reply.error.reason


def test_an_update_of_zeros_is_noise_of_the_requested_share():
    model = {"w": np.zeros(20_000, np.float32)}
    update = update_of(ask(model, model, ClipAndNoise(clipping_norm=1.0, noise_stddev=0.7)))
    assert update["w"].std() == pytest.approx(0.7, rel=0.03)


@pytest.mark.parametrize(
    "counter", [np.array(3), np.array([True, False]), np.arange(3, dtype="u1")]
)
def test_counters_leave_the_client_as_they_came(counter):
    model = {"w": np.zeros(3, np.float32), "n": counter}
    returned = {"w": np.ones(3, np.float32), "n": np.ones_like(counter)}
    update = update_of(ask(model, returned))
    assert update["n"].dtype == counter.dtype
    assert update["n"].shape == counter.shape
    assert not update["n"].any()  # the difference to the received values
    assert np.linalg.norm(update["w"]) == pytest.approx(1.0, rel=1e-4)


def test_a_difference_that_overflows_counts_as_none():
    model = {"w": np.full(2, -3e38, np.float32)}
    update = update_of(ask(model, {"w": np.full(2, 3e38, np.float32)}))
    assert np.abs(update["w"]).max() < 1e-4


def test_the_norm_before_clipping_is_sent_if_diagnostics_are_requested():
    model = {"w": np.zeros(4, np.float32), "n": np.array(0)}
    reply = ask(model, {"w": np.full(4, 2.0, np.float32), "n": np.array(9)}, diagnostics=True)
    assert dict(reply.content["metrics"]) == {"update-norm": 4.0}


@pytest.mark.parametrize(
    ("protection", "facts", "said"),
    [
        (OutputPerturbation(clipping_norm=1.0, noise_stddev=1.0), {}, "'OutputPerturbation'"),
        (None, {}, "'none'"),
        (TIGHT, {"clipping-norm": -1.0}, "clipping-norm"),
        (TIGHT, {"noise-stddev": float("nan")}, "noise-stddev"),
        (TIGHT, {"noise-stddev": 0.0}, "noise-stddev"),
        (TIGHT, {"number": 0}, "number"),
        (TIGHT, {"another": 1.0}, "a known protection"),
    ],
)
def test_a_message_beyond_the_mods_abilities_is_refused_by_name(protection, facts, said):
    model = {"w": np.zeros(3, np.float32)}
    reply = ask(model, model, protection, **facts)
    assert reply.has_error()
    assert said in reply.error.reason


def test_a_plan_whose_server_noises_asks_the_client_for_nothing():
    model = {"w": np.zeros(3, np.float32)}
    reply = ask(model, {"w": np.ones(3, np.float32)}, ProtectedByServer())
    np.testing.assert_array_equal(reply.content["arrays"]["w"].numpy(), np.ones(3))
