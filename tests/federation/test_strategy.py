"""The strategy that all methods share, through DP-FedAvg and DP²-FedSAM on real ClientApps."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg

from flower_ext.algorithms import DP2FedSAM, DPDitto, DPFedAvg, DPFedSAM, Hosted
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, FederationNotReady, InProcessGrid, VirtualGrid
from flower_ext.federation.client.client_level_mod import client_level_dp_mod
from flower_ext.federation.messages import exchange, records
from flower_ext.federation.messages.for_mods import FOR_MODS
from flower_ext.federation.server.run_guarantees import spent_by
from flower_ext.privacy import (
    AdversaryView,
    Budget,
    FixedSizeSampling,
    FullParticipation,
    Ledger,
    NonPrivatePlan,
    PoissonSampling,
    RecordLevelPlan,
    privacy_loss_of,
)
from flower_ext.runs import RunWriter
from flower_ext.training import LocalTraining, Task, UnshareableModel
from tests.support.losses import most_rounds
from tests.support.other_ray import use_ray
from tests.support.plans import release_plan
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder, Tampering
from tests.support.worlds import FEATURES, Net, client_data, initial, task

CLIENTS = 6
FAST = LocalTraining(epochs=1, batch_size=10)
plan = partial(release_plan, CLIENTS, sampling=FixedSizeSampling(CLIENTS, 4))


def grid_of(app: ClientApp | None = None, clients: int = CLIENTS) -> InProcessGrid:
    app = app or DP2FedSAM.client_app(task(), allow_seeded_noise=True)
    return InProcessGrid(app, num_clients=clients)


def average_app(app: ClientApp | None = None) -> ClientApp:
    return app or DPFedAvg.client_app(task(), allow_seeded_noise=True)


def all_arrays(message: Message):
    if not message.has_content():
        return
    for record in message.content.array_records.values():
        yield from record.items()


def test_a_spend_has_both_epsilons_their_delta_and_the_number_of_units():
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan(), evaluate_every=0)
    strategy.start(grid_of(average_app()), initial(), num_rounds=2)
    epsilons = {f"epsilon_{one.basis}": one.epsilon for one in strategy.guarantees()}
    assert len(epsilons) == 2
    assert spent_by(strategy.run) == {**epsilons, "delta": 0.1, "privacy_units": CLIENTS}
    bare = FederatedStrategy(
        DPFedAvg(local=FAST), NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    )
    bare.start(grid_of(average_app()), initial(), num_rounds=1)
    assert spent_by(bare.run) == {}


def test_no_message_contains_personal_parameters_by_name_or_value():
    grid = Recorder(DP2FedSAM.client_app(task()), num_clients=CLIENTS)
    strategy = FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST), plan())
    strategy.start(grid, initial(), num_rounds=3)
    heads = [
        records.to_arrays(record)
        for context in grid.contexts.values()
        for record in context.state.array_records.values()
    ]
    assert len(heads) >= 4
    moved = [not np.array_equal(h["head.weight"], initial()["head.weight"].numpy()) for h in heads]
    assert all(moved)  # otherwise there would be nothing to leak
    secrets = {array.tobytes() for head in heads for array in head.values()}
    seen = 0
    for message in grid.sent + grid.received:
        if not message.has_content():
            continue
        for name, array in all_arrays(message):
            seen += 1
            assert not name.startswith("head")
            assert not any(secret in array.data for secret in secrets)
        for kind in (message.content.config_records, message.content.metric_records):
            for record in kind.values():
                assert not any("head" in key and key != "training.head" for key in record)
    assert seen > 20


def test_a_client_keeps_its_head_when_it_is_not_sampled():
    grid = grid_of()
    strategy = FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST), plan(), seed=3)
    strategy.start(grid, initial(), num_rounds=1)
    before = {n: dict(c.state.array_records) for n, c in grid.contexts.items()}
    absent = [n for n, records_ in before.items() if not records_]
    present = [n for n, records_ in before.items() if records_]
    assert len(absent) == 2
    assert len(present) == 4
    strategy.configure_evaluate(2, initial(), ConfigRecord(), grid)
    after = {n: dict(c.state.array_records) for n, c in grid.contexts.items()}
    assert after == before


def test_nothing_but_the_noised_update_leaves_a_client_in_training():
    grid = Recorder(DP2FedSAM.client_app(task()), num_clients=CLIENTS)
    FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST), plan(), evaluate_every=0).start(
        grid, initial()
    )
    replies = [m for m in grid.received if m.metadata.message_type.startswith("train")]
    assert replies
    for reply in replies:
        assert set(reply.content.keys()) == {records.UPDATE}


def test_clipping_and_noise_are_on_the_update_as_the_plan_says():
    grid = Recorder(average_app(), num_clients=CLIENTS)
    wide = plan(noise_multiplier=50.0)
    FederatedStrategy(DPFedAvg(local=FAST), wide, evaluate_every=0).start(
        grid, initial(), num_rounds=20
    )
    uploads = [
        np.concatenate([a.numpy().ravel() for _, a in all_arrays(m)])
        for m in grid.received
        if m.metadata.message_type.startswith("train")
    ]
    measured = np.concatenate(uploads).std()
    assert measured == pytest.approx(wide.mechanism().client_noise_stddev(4), rel=0.05)

    silent = plan(noise_multiplier=1e-9)
    grid = Recorder(average_app(), num_clients=CLIENTS)
    FederatedStrategy(
        DPFedAvg(local=LocalTraining(learning_rate=5.0)), silent, evaluate_every=0
    ).start(grid, initial(), num_rounds=1)
    norms = [
        np.sqrt(sum(np.sum(a.numpy() ** 2.0) for _, a in all_arrays(m)))
        for m in grid.received
        if m.metadata.message_type.startswith("train")
    ]
    assert max(norms) == pytest.approx(0.5, rel=1e-4)


def test_a_seeded_run_repeats_bit_for_bit_and_another_seed_differs():
    def final(seed):
        strategy = FederatedStrategy(
            DP2FedSAM(head=FAST, extractor=FAST), plan(), seed=seed, seeded_noise=True
        )
        return strategy.start(grid_of(), initial(), num_rounds=2).arrays["extractor.weight"].data

    assert final(5) == final(5)
    assert final(5) != final(6)


def test_secure_noise_never_repeats_even_under_a_seed():
    def final():
        strategy = FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST), plan(), seed=5)
        return strategy.start(grid_of(), initial(), num_rounds=1).arrays["extractor.weight"].data

    assert final() != final()


def test_clients_refuse_seeded_noise_unless_enabled_and_nodes_may_forbid_it():
    for app, veto in (
        (DP2FedSAM.client_app(task()), False),
        (DP2FedSAM.client_app(task(), allow_seeded_noise=True), True),
    ):
        grid = grid_of(app)
        for context in grid.contexts.values():
            context.node_config["require-secure-noise"] = veto
        strategy = FederatedStrategy(
            DP2FedSAM(head=FAST, extractor=FAST),
            plan(),
            seed=1,
            seeded_noise=True,
            evaluate_every=0,
        )
        with pytest.raises(FederationNotReady, match="no client ever sent a usable reply"):
            strategy.start(grid, initial(), num_rounds=1)
        assert len(strategy.refusals) == 4
        assert "does not allow" in strategy.refusals[0]


def test_cohorts_are_drawn_over_partitions_reproducibly():
    def cohorts(seed, **options):
        strategy = strategy_of(
            DPFedAvg,
            plan=plan(sampling=PoissonSampling(CLIENTS, 0.5)),
            local=FAST,
            seed=seed,
            **options,
        )
        drawn = []
        for server_round in range(1, 6):
            messages = strategy.configure_train(
                server_round, initial(), ConfigRecord(), grid_of(average_app())
            )
            drawn.append([m.metadata.dst_node_id for m in messages])
        return drawn

    assert cohorts(1, seeded_noise=True) == cohorts(1, seeded_noise=True)
    assert cohorts(1, seeded_noise=True) != cohorts(2, seeded_noise=True)
    assert len({str(cohorts(1)) for _ in range(5)}) > 1  # ε needs them to be secret


def test_messages_come_as_a_list_for_a_deployed_superlink():
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan())
    grid = grid_of(average_app())
    assert isinstance(strategy.configure_train(1, initial(), ConfigRecord(), grid), list)
    assert isinstance(strategy.configure_evaluate(1, initial(), ConfigRecord(), grid), list)


class Late(InProcessGrid):
    """A grid whose nodes appear one by one."""

    polls = 0

    def get_node_ids(self):
        self.polls += 1
        return list(super().get_node_ids())[: self.polls]


def test_a_run_waits_for_all_nodes_before_it_samples():
    grid = Late(average_app(), num_clients=CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan(sampling=FullParticipation(CLIENTS)))
    assert len(strategy.configure_train(1, initial(), ConfigRecord(), grid)) == CLIENTS


@pytest.mark.parametrize(
    ("clients", "message"), [(4, "4 of 6 nodes"), (7, "7 nodes are connected")]
)
def test_a_missing_population_is_an_error_that_says_what_to_change(clients, message):
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan(), timeout=0.3)
    with pytest.raises(FederationNotReady, match=message):
        strategy.start(grid_of(average_app(), clients), initial(), num_rounds=1)


def test_two_nodes_with_one_partition_are_an_error():
    grid = grid_of(average_app())
    for context in list(grid.contexts.values())[:2]:
        context.node_config["partition-id"] = 3
    with pytest.raises(FederationNotReady, match="both hold partition 3"):
        FederatedStrategy(DPFedAvg(local=FAST), plan()).start(grid, initial(), num_rounds=1)


@pytest.mark.parametrize("node_config", [None, "3", True, CLIENTS, -1])
def test_a_node_without_a_partition_is_named_with_its_node_config(node_config):
    grid = grid_of(average_app())
    grid.contexts[1_003].node_config["partition-id"] = node_config
    with pytest.raises(
        FederationNotReady, match=f"node 1003 says .* '?{node_config}'?: set partition-id"
    ):
        FederatedStrategy(DPFedAvg(local=FAST), plan()).start(grid, initial(), num_rounds=1)


def test_the_error_says_why_nodes_cannot_name_their_partitions():
    app = ClientApp()

    @app.query("identity")
    def _(message, context):
        raise OSError("no route to the data")

    with pytest.raises(FederationNotReady, match="the client failed; the reason is in its own log"):
        FederatedStrategy(DPFedAvg(local=FAST), plan()).start(grid_of(app), initial(), num_rounds=1)
    grid = VirtualGrid(grid_of(average_app(), 3), 2)
    grid._grid.contexts[1_001].node_config.clear()
    with pytest.raises(FederationNotReady, match=r"partitions \[2, 3\].*partition-id=None"):
        FederatedStrategy(DPFedAvg(local=FAST), plan()).start(grid, initial(), num_rounds=1)


class Replaced(InProcessGrid):
    """A grid of SuperNodes, of which partition 2's returns as partition 0 before round 2."""

    simulates_nodes = False

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if messages[0].metadata.group_id == "2":
            self.contexts[1_002].node_config["partition-id"] = 0
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("clients_per_node", [1, 2])
def test_a_node_that_comes_back_as_another_partition_takes_no_part(monkeypatch, clients_per_node):
    use_ray(monkeypatch)  # the ServerApp's own use makes no simulation
    everyone = FullParticipation(CLIENTS * clients_per_node)
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan(sampling=everyone), timeout=5.0)
    nodes = Replaced(average_app(), num_clients=CLIENTS)
    grid = nodes if clients_per_node == 1 else VirtualGrid(nodes, clients_per_node)
    result = strategy.start(grid, initial(), num_rounds=2)
    answered = [m["answered"] for m in result.train_metrics_clientapp.values()]
    assert answered == [CLIENTS * clients_per_node, (CLIENTS - 1) * clients_per_node]
    assert len(strategy.refusals) == 2 * clients_per_node  # in training and in evaluation
    assert all("that this node held when the run asked" in refusal for refusal in strategy.refusals)


def broken(value):
    """Return a change that fills an array of an upload with one value."""

    def change(reply):
        record = reply.content.array_records["update"]
        name = next(iter(record))
        record[name] = Array(np.full(record[name].shape, value, np.float32))
        return [reply]

    return change


def stale(reply):
    reply.metadata.__dict__["_group_id"] = "0"
    return [reply]


def stranger(reply):
    reply.metadata.__dict__["_src_node_id"] = 5
    return [reply]


def test_bad_replies_are_refused_counted_and_dropouts_for_the_plan(tmp_path):
    grid = Tampering(average_app(), num_clients=CLIENTS)
    grid.tamper = {
        0: broken(np.nan),
        1: broken(np.inf),
        2: stale,
        3: stranger,
        4: lambda reply: [],  # lost
        5: lambda reply: [reply, reply],  # duplicated, counts once
    }
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = FederatedStrategy(
        DPFedAvg(local=FAST),
        plan(sampling=FullParticipation(CLIENTS)),
        ledger=ledger,
        directory=(run := RunWriter.create(tmp_path / "run", {})),
    )
    before = initial()
    result = strategy.start(grid, before, num_rounds=1)
    (row,) = run.metrics()
    assert row["answered"] == 1
    assert row["refused"] == 5
    reasons = " ".join(strategy.refusals)
    for word in ("NaN or infinite", "answers round 0", "not asked", "answered already"):
        assert word in reasons
    entries = Ledger.read(ledger.path)
    moved = result.arrays["head.weight"].data != before["head.weight"].data
    assert row["topped_up_stddev"] == pytest.approx(0.5 * np.sqrt(5 / 6))
    assert entries[-1]["kind"] == "commit"
    assert entries[-1]["notes"]["answered"] == 1
    assert moved
    assert ledger.releases == 1


def test_the_run_stops_cleanly_at_its_budget_and_sends_nothing_beyond(tmp_path):
    sampling = PoissonSampling(CLIENTS, 0.5)
    the_plan = plan(sampling=sampling, noise_multiplier=4.0)
    fitting = most_rounds(epsilon=0.4, delta=0.1, sampling=sampling, noise_multiplier=4.0)
    assert 1 <= fitting < 30
    ledger = Ledger(tmp_path / "ledger.jsonl", budget=Budget(epsilon=0.4, delta=0.1))
    grid = Recorder(average_app(), num_clients=CLIENTS)
    strategy = FederatedStrategy(
        DPFedAvg(local=FAST), the_plan, evaluate_every=0, ledger=ledger, seed=1
    )
    strategy.start(grid, initial(), num_rounds=30)
    rounds = {m.metadata.group_id for m in grid.sent if m.metadata.message_type.startswith("train")}
    assert max(map(int, rounds)) <= fitting
    assert ledger.releases == fitting
    assert "above the budget" in strategy.stopped
    models = next(g for g in strategy.guarantees() if g.view is AdversaryView.RELEASED_MODELS)
    assert models.epsilon <= 0.4


def test_with_seeded_noise_every_release_is_on_the_ledger_whoever_makes_it(tmp_path):
    ledger, run = Ledger(tmp_path / "ledger.jsonl"), RunWriter.create(tmp_path / "run", {})

    def strategy(**how):
        options = {"plan": plan(), "local": FAST, "evaluate_every": 0, "ledger": ledger, "seed": 1}
        return strategy_of(DPFedAvg, **{**options, "seeded_noise": True, **how})

    twice = strategy()
    runs = [
        twice,
        twice,
        strategy(),
        strategy(seed=2),
        strategy(directory=run),
        strategy(directory=run),
    ]
    for number, one in enumerate(runs, start=1):
        one.start(grid_of(average_app()), initial(), num_rounds=2)
        assert ledger.releases == 2 * number
    run.close()


def test_a_client_without_test_or_training_examples_says_what_it_has():
    def share(outputs, targets):
        if len(targets) == 0:
            raise ValueError("a share of nothing")
        return float((outputs.argmax(dim=1) == targets).float().mean())

    nothing = Examples(torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.long))

    def data(client):
        one = client_data(client)
        if client == 2:
            return ClientData(train=one.train, test=nothing)
        return one if client != 3 else ClientData(train=nothing, test=one.test)

    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan(), training_loss=True)
    grid = Recorder(
        average_app(DPFedAvg.client_app(replace(task(), data=data, metrics={"share": share}))),
        num_clients=CLIENTS,
    )
    strategy.start(grid, initial(), num_rounds=1)
    assert all("cannot train" in refusal for refusal in strategy.refusals)  # of client 3
    metrics = {
        reply.metadata.src_node_id - 1_000: set(reply.content.metric_records[records.METRICS])
        for reply in grid.received
        if reply.metadata.message_type.startswith("evaluate")
    }
    both = {"loss", "share", "training_loss", "num-examples"}
    assert metrics == {
        **dict.fromkeys(range(CLIENTS), both),
        2: {"training_loss", "num-examples"},
        3: both - {"training_loss"},
    }
    assert set(strategy.run.client_metrics) == {0, 1, 3, 4, 5}


def test_guarantees_of_a_run_say_what_is_not_covered():
    strategy = FederatedStrategy(
        DP2FedSAM(head=FAST, extractor=FAST),
        plan(),
        diagnostics=True,
        seed=1,
        disclosures=["a figure by hand"],
    )
    strategy.start(grid_of(), initial(), num_rounds=2)
    published, models, *_ = strategy.guarantees()
    assert published.basis == "published"
    text = models.statement()
    assert "scores" in text
    assert "norms of updates" in text
    assert "a figure by hand" in text
    quiet = FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST), plan(), evaluate_every=0)
    quiet.start(grid_of(), initial(), num_rounds=1)
    assert "scores" not in quiet.guarantees()[1].statement()


@pytest.mark.parametrize("method", [DP2FedSAM, DPFedAvg])
def test_guarantees_of_a_run_say_whether_clients_remember_something(method):
    strategy = strategy_of(method, plan=plan(), evaluate_every=0)
    strategy.start(grid_of(method.client_app(task())), initial(), num_rounds=1)
    models = strategy.guarantees()[1]
    assert ("clients keep values between rounds" in models.statement()) == (method is DP2FedSAM)


def test_without_privacy_there_is_no_guarantee_and_the_mean_is_plain():
    strategy = FederatedStrategy(
        DPFedAvg(local=FAST), NonPrivatePlan(sampling=FullParticipation(CLIENTS)), seed=2
    )
    grid = Recorder(average_app(), num_clients=CLIENTS)
    result = strategy.start(grid, initial(), num_rounds=1)
    assert strategy.guarantees() == []
    updates = [
        m.content.array_records["update"]["head.weight"].numpy()
        for m in grid.received
        if m.metadata.message_type.startswith("train")
    ]
    expected = initial()["head.weight"].numpy() + np.mean(updates, axis=0)
    np.testing.assert_allclose(result.arrays["head.weight"].numpy(), expected, atol=1e-7)


def test_batch_norm_in_the_shared_part_is_refused_before_sending():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    grid = Recorder(average_app(), num_clients=CLIENTS)
    with pytest.raises(UnshareableModel, match="GroupNorm in layer '1'"):
        FederatedStrategy(DPFedAvg(local=FAST), plan()).start(grid, ArrayRecord(model.state_dict()))
    assert not any(m.metadata.message_type.startswith("train") for m in grid.sent)


def foreign_app() -> ClientApp:
    """Return a ClientApp as in Flower's tutorials, which does not use this package."""
    app = ClientApp()

    def client(context: Context):
        return task().data(int(context.node_config["partition-id"]))

    @app.train()
    def _(message: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=message.content["config"]["lr"])
        data = client(context).train
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(data.features), data.targets).backward()
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(data), "loss": 0.5}),
        }
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def _(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"accuracy": 0.5, "num-examples": 10})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_a_foreign_client_app_without_noise_equals_flowers_fedavg():
    config = ConfigRecord({"lr": 0.1})
    plain = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    ours = FederatedStrategy(DPFedAvg(), plain).start(
        grid_of(foreign_app()), initial(), num_rounds=2, train_config=config
    )
    theirs = FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS).start(
        grid_of(foreign_app()), initial(), num_rounds=2, train_config=config
    )
    for name in initial():
        np.testing.assert_allclose(
            ours.arrays[name].numpy(), theirs.arrays[name].numpy(), atol=1e-6
        )
    assert ours.evaluate_metrics_clientapp[1]["accuracy_mean"] == 0.5


def test_a_foreign_client_app_gets_the_records_of_flowers_strategy():
    seen = {"train": [], "evaluate": []}

    class Reading(InProcessGrid):
        def _answer_in_process(self, messages):
            for message in messages:
                kind = message.metadata.message_type
                if kind in seen:
                    config = message.content["config"].items()
                    seen[kind].append({n: v for n, v in config if not n.startswith(FOR_MODS)})
            return super()._answer_in_process(messages)

    config = ConfigRecord({"lr": 0.1})
    FederatedStrategy(DPFedAvg(), NonPrivatePlan(sampling=FullParticipation(CLIENTS))).start(
        Reading(foreign_app(), CLIENTS), initial(), num_rounds=2, train_config=config
    )
    ours = {kind: list(configs) for kind, configs in seen.items()}
    seen["train"].clear()
    seen["evaluate"].clear()
    FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS).start(
        Reading(foreign_app(), CLIENTS), initial(), num_rounds=2, train_config=config
    )
    assert ours == seen
    assert ours["train"][-1] == {"lr": 0.1, "server-round": 2}


def failing(message, context):
    raise KeyError("local-epochs")


def renaming(message, context):
    arrays = ArrayRecord({f"module.{n}": a for n, a in message.content["arrays"].items()})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


def diverging(message, context):
    received = message.content["arrays"].items()
    arrays = ArrayRecord({n: Array(np.full_like(a.numpy(), np.nan)) for n, a in received})
    return Message(RecordDict({"arrays": arrays}), reply_to=message)


def answering_nothing(message, context):
    return None


def losing_its_state(message, context):
    context.state = None
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)


BROKEN = [failing, renaming, diverging, answering_nothing, losing_its_state]


def failing_app(fails, how=failing, mods=()) -> ClientApp:
    """Return another project's ClientApp whose training is broken on partitions that ``fails``."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def _(message: Message, context: Context) -> Message:
        if fails(context.node_config["partition-id"]):
            return how(message, context)
        content = {"arrays": message.content["arrays"]}
        return Message(
            RecordDict({**content, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    return app


@pytest.mark.parametrize("placement", ["server", "client"])
@pytest.mark.parametrize("how", BROKEN)
def test_a_foreign_client_app_that_cannot_train_costs_no_privacy(how, placement, tmp_path):
    noised = plan(noise_placement=placement, sampling=FullParticipation(CLIENTS))
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = FederatedStrategy(DPFedAvg(), noised, ledger=ledger, evaluate_every=0)
    mods = [client_level_dp_mod()] if placement == "client" else []
    app = failing_app(lambda partition: True, how, mods)
    with pytest.raises(FederationNotReady, match="No round began, and no privacy was spent"):
        strategy.start(grid_of(app), initial(), num_rounds=2)
    assert strategy.participations.rounds == 0
    ledger.close()
    assert Ledger.read(tmp_path / "ledger.jsonl") == []


@pytest.mark.parametrize("how", BROKEN)
def test_a_foreign_client_that_fails_on_its_data_ends_no_run(how):
    noised = plan(noise_placement="server", sampling=FullParticipation(CLIENTS))
    strategy = FederatedStrategy(DPFedAvg(), noised, evaluate_every=0)
    app = failing_app(lambda partition: partition == 0, how)
    strategy.start(grid_of(app), initial(), num_rounds=2)
    assert strategy.participations.rounds == 2


def test_a_run_ends_once_it_is_clear_that_no_client_answers(logged):
    """There is no rehearsal, because nothing is spent, and the log does not say otherwise."""
    without = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    strategy = FederatedStrategy(DPFedAvg(), without, evaluate_every=0)
    with pytest.raises(FederationNotReady, match="no client ever sent a usable reply"):
        strategy.start(grid_of(failing_app(lambda partition: True)), initial(), num_rounds=9)
    assert strategy.participations.rounds == 1
    assert "round 1 discarded" in logged.text
    assert "spent nevertheless" not in logged.text


def test_a_foreign_apps_changes_to_its_message_reach_no_other_client():
    seen = []
    app = ClientApp()

    @app.train()
    def _(message: Message, context: Context) -> Message:
        seen.append(message.content["config"]["lr"])
        message.content["config"]["lr"] = 0.0
        arrays = ArrayRecord(dict(message.content["arrays"]))
        message.content["arrays"].clear()
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    noised = plan(noise_placement="server", sampling=FullParticipation(CLIENTS))
    strategy = FederatedStrategy(DPFedAvg(), noised, evaluate_every=0)
    strategy.start(grid_of(app), initial(), num_rounds=2, train_config=ConfigRecord({"lr": 0.5}))
    assert set(seen) == {0.5}
    assert strategy.refusals == []


def test_mods_that_expect_what_flowers_strategies_send_find_it():
    """Flower's own mods refuse messages with a second record of settings."""
    kinds = []

    def mod(message, context, call_next):
        if message.metadata.message_type == "train":
            kinds.append([*message.content])
        return call_next(message, context)

    noised = plan(noise_placement="server", sampling=FullParticipation(CLIENTS))
    strategy = FederatedStrategy(DPFedAvg(), noised, evaluate_every=0)
    app = failing_app(lambda partition: False, mods=[mod])
    strategy.start(grid_of(app), initial(), num_rounds=1)
    assert kinds == [["arrays", "config"]] * len(kinds)
    assert len(kinds) > CLIENTS


def test_a_foreign_client_app_is_no_error_in_the_log(logged):
    grid = grid_of(foreign_app())
    config = ConfigRecord({"lr": 0.1})
    noised = plan(noise_placement="server", sampling=FullParticipation(CLIENTS))
    FederatedStrategy(DPFedAvg(), noised).start(grid, initial(), num_rounds=1, train_config=config)
    assert not [r for r in logged.records if r.levelname == "ERROR" or r.exc_info]


def test_a_run_may_stop_early_and_is_evaluated_where_it_stops():
    without = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    strategy = FederatedStrategy(DPFedAvg(local=FAST), without, evaluate_every=5)
    rounds = []

    def enough(server_round, result):
        rounds.append(server_round)
        return server_round == 2

    result = strategy.start(
        grid_of(DPFedAvg.client_app(task())), initial(), num_rounds=9, should_stop=enough
    )
    assert rounds == [1, 2]
    assert strategy.participations.rounds == 2
    assert list(result.evaluate_metrics_clientapp) == [2]


def test_a_simulated_foreign_client_app_is_asked_for_its_partition_once():
    requests = []

    class Counting(InProcessGrid):
        def _answer_in_process(self, messages):
            requests.extend(message.metadata.message_type for message in messages)
            return super()._answer_in_process(messages)

    grid = Counting(foreign_app(), num_clients=CLIENTS)
    without = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    FederatedStrategy(DPFedAvg(local=FAST), without).start(
        grid, initial(), num_rounds=2, train_config=ConfigRecord({"lr": 0.1})
    )
    assert requests.count("query.identity") == 1


def test_a_foreign_client_app_is_bounded_and_noised_by_the_server():
    the_plan = plan(noise_placement="server", sampling=FullParticipation(CLIENTS))
    strategy = FederatedStrategy(DPFedAvg(), the_plan)
    strategy.start(
        grid_of(foreign_app()), initial(), num_rounds=1, train_config=ConfigRecord({"lr": 100.0})
    )
    assert strategy.refusals == []
    assert strategy.guarantees()[1].view is AdversaryView.RELEASED_MODELS


@pytest.mark.parametrize("strategy", [DPFedAvg, DP2FedSAM])
def test_a_foreign_client_app_is_not_trusted_with_unknown_requests(strategy):
    with pytest.raises(FederationNotReady, match=f"{strategy.__name__}.client_app"):
        strategy_of(strategy, plan=plan()).start(grid_of(foreign_app()), initial(), num_rounds=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": 0.5}, "server=0.5: expected an optimizer"),
        ({"average": 3}, "average=3: expected ExponentialAverage"),
        ({"evaluate_every": -1}, "evaluate_every"),
        ({"seeded_noise": True}, "seeded_noise=True: expected a seed"),
        (
            {"personal": ("extractor", "head")},
            "expected names that leave at least one parameter shared",
        ),
        ({"personal": "head"}, r"a sequence of names, .* \('head',\)"),
    ],
)
def test_unfit_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        strategy_of(DPFedAvg, plan=plan(), **options).start(
            grid_of(average_app()), initial(), num_rounds=1
        )


def test_a_ledger_that_would_stay_empty_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    everyone = FullParticipation(CLIENTS)
    noised = RecordLevelPlan(
        sampling=everyone, clipping_norm=1.0, noise_stddev=1.0, num_examples=9, rounds=3, delta=0.1
    )
    for other in (NonPrivatePlan(sampling=everyone), noised):
        with pytest.raises(
            ValueError, match="expected a ReleasePlan, whose releases a ledger records"
        ):
            FederatedStrategy(DPFedAvg(local=FAST), other, ledger=ledger)
    ledger.close()


def test_where_a_budget_stops_a_run_its_guarantee_covers_all_releases(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    spent = privacy_loss_of({plan().mechanism().release: 5}, delta=0.1).epsilon
    strategy = FederatedStrategy(
        DPFedAvg(local=FAST),
        plan(),
        budget=Budget(epsilon=spent + 1e-6, delta=0.1),
        directory=run,
        evaluate_every=3,
    )
    strategy.start(grid_of(DPFedAvg.client_app(task())), initial(), num_rounds=9)
    assert strategy.stopped is not None
    assert strategy.participations.rounds == 5
    assert run.guarantees() == strategy.guarantees()


@pytest.mark.parametrize("method", [DP2FedSAM, DPFedAvg])
def test_a_misspelt_personal_name_is_refused_as_its_part_would_be_shared(method):
    local = {"local": FAST} if method is DPFedAvg else {"head": FAST, "extractor": FAST}
    strategy = strategy_of(method, plan=plan(), **local, personal=("haed",))
    with pytest.raises(ValueError, match="personal='haed'.* did you mean 'head'"):
        strategy.start(grid_of(), initial(), num_rounds=1)


def test_a_personal_name_without_its_outer_modules_is_refused_with_a_star():
    """Hugging Face's classifier is below ``base_model.model``."""
    model = ArrayRecord({f"base.{n}": p for n, p in task().initial_params(0).items()})
    strategy = FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST, personal=("head",)), plan())
    with pytest.raises(ValueError, match=r"personal='head'.* did you mean '\*\.head'"):
        strategy.start(grid_of(), model, num_rounds=1)


@pytest.mark.parametrize("name", ["last", "head2"])
def test_a_personal_name_that_the_model_lacks_is_logged(name, caplog):
    strategy = FederatedStrategy(DP2FedSAM(head=FAST, extractor=FAST, personal=(name,)), plan())
    with pytest.raises(FederationNotReady, match=r"personal= to name at least one of"):
        strategy.start(grid_of(), initial(), num_rounds=1)
    assert f"personal={name!r} matches no parameter of the model: ['extractor" in caplog.text


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_that_once_had_an_answer_continues_despite_refusals(tmp_path, rounds):
    app = DPFedAvg.client_app(task(), allow_seeded_noise=True)

    def play(rounds, refusing):
        grid = grid_of(app)
        for node in refusing:
            grid.contexts[node].node_config["require-secure-noise"] = True
        run = RunWriter.resume(path) if path.exists() else RunWriter.create(path, {})
        with contextlib.closing(run):
            everyone = FullParticipation(CLIENTS)
            strategy = FederatedStrategy(
                DPFedAvg(local=FAST),
                plan(sampling=everyone),
                seed=1,
                seeded_noise=True,
                directory=run,
            )
            strategy.start(grid, initial(), num_rounds=rounds)
        return strategy

    path = tmp_path / "run"
    play(1, refusing=[1_000])
    again = play(rounds, refusing=range(1_000, 1_000 + CLIENTS))
    assert len(again.refusals) == 1 + (CLIENTS if rounds == 2 else 0)
    # All refusals count, but no checkpoint grows with each of them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "MOST_REASONS", len(again.refusals) + 1)
        for more in (1, 2):
            last = play(rounds + more, refusing=range(1_000, 1_000 + CLIENTS))
            assert len(last.refusals) == len(again.refusals) + 1
            assert last.run.clients.refused == len(again.refusals) + CLIENTS * more
    stored = last.run.checkpoints.newest().values
    assert stored["refusals"] == last.refusals


def test_a_method_sees_no_single_update_under_a_release_plan():
    seen = []

    class Curious(DPFedAvg):
        needs_each_update = True

        def step(self, model, released, state):
            seen.append(len(released.updates))
            return super().step(model, released, state)

    class Careless(Curious):
        needs_each_update = False

    app, free = DPFedAvg.client_app(task()), NonPrivatePlan(sampling=FixedSizeSampling(CLIENTS, 4))
    with pytest.raises(ValueError, match="needs each client's update"):
        FederatedStrategy(Curious(local=FAST), plan())
    with pytest.raises(ValueError, match="needs_each_update = True"):
        FederatedStrategy(Careless(local=FAST), plan()).start(grid_of(app), initial(), num_rounds=1)
    FederatedStrategy(Curious(local=FAST), free).start(grid_of(app), initial(), num_rounds=1)
    assert seen == [4]


class DPCareful(DPFedAvg):
    """A method of another project."""


@pytest.mark.parametrize(
    ("method", "private", "label"),
    [
        (DPFedAvg(), False, "FedAvg"),
        (DPFedAvg(), True, "DPFedAvg"),
        (DPDitto(), False, "Ditto"),
        (DPFedSAM(), False, "FedSAM"),
        (DP2FedSAM(personal=("head",)), False, "DP2FedSAM"),
        (DPCareful(), False, "DPCareful"),  # a subclass keeps its name
        (Hosted(FedAdam()), False, "Hosted-FedAdam"),
    ],
)
def test_a_method_without_privacy_is_not_logged_as_a_private_one(method, private, label, caplog):
    caplog.set_level("INFO", logger="flwr")
    chosen = plan() if private else NonPrivatePlan(sampling=FullParticipation(4))
    FederatedStrategy(method, chosen).summary()
    assert caplog.messages[0].startswith(f"{label} · ")


def test_training_beyond_the_rounds_of_the_plan_is_logged_once(caplog):
    few = replace(plan(), rounds=2)
    FederatedStrategy(DPFedAvg(local=FAST), few).start(
        grid_of(average_app()), initial(), num_rounds=4
    )
    messages = [line for line in caplog.messages if "beyond" in line]
    assert len(messages) == 1
    assert "training round 3 is beyond the 2 rounds for which" in messages[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda i: (torch.zeros(3, 6), torch.zeros(3)), "of the Task: expected ClientData"),
        (
            lambda i: Path(f"/no/{i}").read_bytes() and client_data(i),
            "the reason is in its own log",
        ),
    ],
)
def test_unusable_data_give_one_line_and_one_log_entry(data, message, caplog):
    strategy = FederatedStrategy(DPFedAvg(local=FAST), NonPrivatePlan(sampling=plan().sampling))
    app = DPFedAvg.client_app(Task(model=Net, data=data, device="cpu"))
    with pytest.raises(FederationNotReady, match=message) as failed:
        strategy.start(grid_of(app), initial(), num_rounds=2)
    assert "\n" not in str(failed.value)
    assert not any("\n" in refusal for refusal in strategy.refusals)
    errors = [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
    errors = [r for r in errors if r.getMessage().startswith("client ")]
    assert len(errors) == 1
