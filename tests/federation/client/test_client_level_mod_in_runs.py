"""The mod of client-level privacy in whole runs, with any data of a client."""

from dataclasses import replace

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
)
from flower_ext.federation.messages import records
from flower_ext.federation.messages.for_mods import FOR_MODS, REHEARSAL
from flower_ext.federation.sums.masked import BEGIN, KEYS, SENT, UNMASK
from flower_ext.privacy import (
    AdaptiveClipping,
    AdversaryView,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    PoissonSampling,
    SecureScores,
    SecureSum,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.training import Task, UnshareableModel
from tests.support.client_level import (
    CLIENTS,
    START,
    ask,
    foreign_app,
    moved,
    plan,
    run,
    start,
)
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder

SECRET = "record 17 is Anna's"


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
    """Return an app of this package that trains what the foreign app trains."""

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
    rehearsed = "whether the training of up to three clients failed in the rehearsal"
    for theirs, of_ours in zip(foreign.guarantees(), ours.guarantees(), strict=True):
        others = tuple(text for text in theirs.not_covered if text != rehearsed)
        assert replace(theirs, not_covered=others) == of_ours
        assert (rehearsed in theirs.not_covered) == (theirs.basis == "provable")
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
        assert list(arrays) in ([SENT], [BEGIN], [KEYS], [UNMASK])


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


def rehearsed(limits, train=moved) -> Message:
    """Return a client's answer to a rehearsal, where the node's owner set ``limits``."""
    grid = InProcessGrid(foreign_app(train), num_clients=1)
    ((node, context),) = grid.contexts.items()
    context.node_config |= limits
    entries = ConfigRecord({f"{FOR_MODS}{REHEARSAL}": True})
    content = RecordDict({records.MODEL: start(), records.CONFIG: entries})
    (reply,) = grid.send_and_receive([Message(content, dst_node_id=node, message_type="train")])
    return reply


@pytest.mark.parametrize(
    "limits",
    [{"least-noise-multiplier": 0.1}, {"least-noise-multiplier": 1}, {"require-secure-sum": True}],
)
def test_a_rehearsal_tells_nothing_where_the_owner_limits_what_leaves(limits):
    trained = []

    def train(received, partition):
        trained.append(partition)
        raise ValueError(SECRET)

    assert rehearsed({"least-noise-multiplier": 0.0}, train).has_error()
    assert trained == [0]
    reply = rehearsed(limits, train)
    assert trained == [0]
    assert is_zero(reply.content[records.UPDATE])
    assert set(reply.content) == {records.UPDATE}


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

    expected, changed = uploads(foreign_app(still)), uploads(odd_app(name))
    assert changed.keys() == expected.keys()
    for node, content in changed.items():
        assert content.keys() == expected[node].keys()
        for key, array in content[records.UPDATE].items():
            other = expected[node][records.UPDATE][key]
            np.testing.assert_array_equal(array.numpy(), other.numpy())
