"""A unit that withdrew from a study is never drawn again, and its node deletes its memory."""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_ext.algorithms import Apple, DPFedAvg, FedAMP, FedPer, UldpAvg
from flower_ext.algorithms.uldp import UldpGroup, UldpNaive
from flower_ext.data import ClientData, SiloData
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    FederatedStrategy,
    FederationNotReady,
    InProcessGrid,
    client_level_dp_mod,
)
from flower_ext.federation.method_state import State
from flower_ext.federation.server.spending import Spending
from flower_ext.federation.storage.folder import deserialised
from flower_ext.privacy import (
    Budget,
    FixedSizeSampling,
    FullParticipation,
    Ledger,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyUnit,
    SecureScores,
    SecureSum,
)
from flower_ext.privacy.withdrawal import forgotten, withdraw
from flower_ext.runs import RunDirectory, RunWriter, write_report
from flower_ext.training import DpSgdTraining
from tests.support import silos
from tests.support.grids import grid as grid_of
from tests.support.plans import release_plan
from tests.support.private_silos import make, make_openly, start
from tests.support.strategies import group_strategy, strategy_of
from tests.support.travelling import Recorder
from tests.support.worlds import task

CLIENTS, LEAVING, DELTA = 6, 2, 0.01


class Watching(InProcessGrid):
    """Records the partitions of all messages but those before the first round."""

    def __init__(self, *given, **options) -> None:
        super().__init__(*given, **options)
        self.asked: list[tuple[str, int]] = []

    def send_and_receive(self, messages, **how):
        messages = list(messages)
        places = {node: place for place, node in enumerate(sorted(self.get_node_ids()))}
        self.asked += [
            (message.metadata.message_type, places[message.metadata.dst_node_id])
            for message in messages
        ]
        return super().send_and_receive(messages, **how)

    def of(self, partition: int) -> list[str]:
        return [kind for kind, clients in self.asked if clients == partition]


def budget(tmp_path) -> Budget:
    return Budget(epsilon=1e6, delta=DELTA, ledger=tmp_path / "study.jsonl")


plan = partial(release_plan, CLIENTS, noise_multiplier=3.0, rounds=9, delta=DELTA)


def run_of(folder: Path, given: Budget, *, plan, rounds=2, method=DPFedAvg, state="", **options):
    """Begin or resume a run in a folder, under a budget."""
    begun = (folder / "run.json").exists()
    run = RunWriter.resume(folder) if begun else RunWriter.create(folder, config={})
    settings = {"state-folder": str(state)} if state else {}
    try:
        strategy = strategy_of(
            method, plan=plan, budget=given, directory=run, timeout=5.0, **options
        )
        app = method.client_app(task(), allow_seeded_noise=True)
        grid = Watching(app, CLIENTS, settings)
        strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=rounds)
    finally:
        run.close()
    return strategy, grid


PLANS = [
    pytest.param(plan(), id="everyone"),
    pytest.param(plan(PoissonSampling(CLIENTS, 0.7)), id="poisson"),
    pytest.param(plan(FixedSizeSampling(CLIENTS, 4)), id="fixed size"),
    pytest.param(plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.2)), id="secure sum"),
    pytest.param(NonPrivatePlan(sampling=FullParticipation(CLIENTS)), id="no privacy"),
]


@pytest.mark.parametrize(
    "chosen", grid_of(PLANS, lambda name: name not in ("everyone", "fixed size"))
)
def test_a_withdrawn_client_is_not_asked_in_resumed_and_later_runs(tmp_path, chosen):
    given = budget(tmp_path)
    seeded = {"seed": 3, "seeded_noise": True}  # by chance, a client may never be drawn
    run_of(tmp_path / "a", given, plan=chosen, rounds=2, **seeded)
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    for name, rounds in (("a", 8), ("b", 6)):
        _, grid = run_of(tmp_path / name, given, plan=chosen, rounds=rounds, **seeded)
        assert not [kind for kind in grid.of(LEAVING) if kind.startswith(("train", "eval"))]
        assert sum(kind.startswith("train") for kind, _ in grid.asked) > 0
        trained = {clients for kind, clients in grid.asked if kind.startswith("train")}
        assert trained == set(range(CLIENTS)) - {LEAVING}
    write_report(RunDirectory.open(tmp_path / "a"))
    assert "1 client withdrew before the last round." in (tmp_path / "a/report.md").read_text()


def test_a_run_that_all_clients_left_says_so(tmp_path):
    given = budget(tmp_path)
    run_of(tmp_path / "a", given, plan=plan())
    withdraw(given.ledger, PrivacyUnit.CLIENT, range(CLIENTS))
    with pytest.raises(FederationNotReady, match="all clients withdrew"):
        run_of(tmp_path / "b", given, plan=plan())


def test_secure_sums_that_no_client_may_leave_are_discarded_after_a_withdrawal(tmp_path):
    given, (folder, later) = budget(tmp_path), (tmp_path / "a", tmp_path / "b")
    chosen = plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.0))
    run_of(folder, given, plan=chosen)
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    _, grid = run_of(later, given, plan=chosen)
    assert not [kind for kind, _ in grid.asked if kind.startswith("train")]
    rows = RunDirectory.open(later).metrics()
    assert [row["discarded"] for row in rows] == [1, 1]


def test_the_draw_of_all_others_stays_the_same_bit_for_bit(tmp_path):
    drawn = {}
    for name in ("with", "without"):
        given = budget(tmp_path / name)
        (tmp_path / name).mkdir()
        given.ledger.touch()
        if name == "without":
            withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
        chosen = plan(PoissonSampling(CLIENTS, 0.5))
        folder = tmp_path / name / "run"
        _, grid = run_of(folder, given, plan=chosen, rounds=12, seed=3, seeded_noise=True)
        drawn[name] = [clients for kind, clients in grid.asked if kind.startswith("train")]
    assert LEAVING in drawn["with"]
    assert drawn["without"] == [clients for clients in drawn["with"] if clients != LEAVING]


def test_a_client_that_withdraws_mid_run_is_omitted_from_the_next_round(tmp_path):
    given, seen = budget(tmp_path), []

    class Leaving(Watching):
        def send_and_receive(self, messages, **how):
            replies = super().send_and_receive(messages, **how)
            if self.asked[-1][0].startswith("train"):
                seen.append(len([k for k in self.of(LEAVING) if k.startswith("train")]))
                if len(seen) == 2:
                    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
            return replies

    strategy = FederatedStrategy(DPFedAvg(), plan(), budget=given, timeout=5.0, evaluate_every=0)
    grid = Leaving(DPFedAvg.client_app(task()), CLIENTS)
    strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=4)
    assert seen == [1, 2, 2, 2]
    assert forgotten(Ledger.read(given.ledger)) == {LEAVING}


SCORES = [SecureScores(noise_multiplier=3.0, times=9)]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(plan(), id="reported scores"),
        pytest.param(
            plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.2), queries=SCORES),
            id="noised scores",
        ),
    ],
)
def test_an_evaluation_omits_a_client_that_withdraws_just_before_it(tmp_path, chosen):
    given = budget(tmp_path)

    class Leaving(Watching):
        def send_and_receive(self, messages, **how):
            replies = super().send_and_receive(messages, **how)
            if self.asked[-1][0].startswith("train"):
                withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
            return replies

    strategy = FederatedStrategy(DPFedAvg(), chosen, budget=given, timeout=5.0)
    grid = Leaving(DPFedAvg.client_app(task()), CLIENTS)
    strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)
    assert any(kind.startswith("eval") for kind in grid.of(0))
    assert not any(kind.startswith("eval") for kind in grid.of(LEAVING))
    assert forgotten(Ledger.read(given.ledger)) == {LEAVING}


def add_a_step(message, context):
    """Train as a ClientApp that does not use this package."""
    moved = {name: Array(array.numpy() + 1) for name, array in message.content["arrays"].items()}
    content = {"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


def test_no_rehearsal_asks_a_client_that_withdrew_since_the_connection(tmp_path):
    given = budget(tmp_path)
    given.ledger.touch()

    class Failing(Watching):
        """The first reply to the rehearsal is lost, while another client withdraws."""

        def send_and_receive(self, messages, **how):
            replies = super().send_and_receive(messages, **how)
            questions = CLIENTS  # the mod reports its node's partition
            if [kind for kind, _ in self.asked].count("train") == questions + 1:
                withdraw(given.ledger, PrivacyUnit.CLIENT, [1])
                return []
            return replies

    app = ClientApp(mods=[client_level_dp_mod()])
    app.train()(add_a_step)
    strategy = FederatedStrategy(DPFedAvg(), plan(), budget=given, timeout=5.0, evaluate_every=0)
    grid = Failing(app, CLIENTS)
    strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=1)
    asked = [clients for kind, clients in grid.asked if kind == "train"][CLIENTS:]
    assert asked == [0, 2, 0, *range(2, CLIENTS)]  # two rehearsals, then the round


def test_nodes_without_partitions_train_nothing_after_a_withdrawal(tmp_path):
    """The order of their ids is not that of partitions, so the wrong client would be left out."""
    given = budget(tmp_path)
    given.ledger.touch()
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    app = ClientApp()
    app.train()(add_a_step)
    strategy = FederatedStrategy(
        DPFedAvg(), plan(noise_placement="server"), budget=given, timeout=5.0, evaluate_every=0
    )
    grid = Watching(app, CLIENTS)
    with pytest.raises(FederationNotReady, match="do not say which clients they are"):
        strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=1)
    assert not [kind for kind, _ in grid.asked if kind != "query.identity"]


def test_only_the_withdrawn_clients_head_vanishes_from_its_node(tmp_path):
    given, state = budget(tmp_path), tmp_path / "nodes"
    chosen = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    heads = {}
    for name in ("a", "b"):
        run_of(tmp_path / name, given, plan=chosen, method=FedPer, state=state)
        heads[name] = sorted(path.name for path in state.glob("*/*-*"))
    assert sum(name.endswith(f"-{LEAVING}") for name in heads["b"]) == 2  # one for each run
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    # Resuming one run deletes the heads of all runs of the study.
    run_of(tmp_path / "a", given, plan=chosen, method=FedPer, state=state, rounds=4)
    left = sorted(path.name for path in state.glob("*/*-*"))
    assert left == [name for name in heads["b"] if not name.endswith(f"-{LEAVING}")]
    assert forgotten(Ledger.read(given.ledger)) == {LEAVING}


def test_a_withdrawn_client_leaves_no_keys_of_secure_sums_on_its_node(tmp_path):
    given, state = budget(tmp_path), tmp_path / "nodes"
    chosen = plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.2))
    for name in ("a", "b"):
        run_of(tmp_path / name, given, plan=chosen, state=state)
    keys = {int(path.name.split("-")[1]) for path in (state / "secrets").glob("*.secret")}
    assert keys == {*range(CLIENTS)}
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    run_of(tmp_path / "b", given, plan=chosen, state=state, rounds=3)
    left = {int(path.name.split("-")[1]) for path in (state / "secrets").glob("*.secret")}
    assert left == keys - {LEAVING}


def test_a_run_starts_without_nodes_of_withdrawn_clients_but_no_others(tmp_path):
    given = budget(tmp_path)
    run_of(tmp_path / "a", given, plan=plan())
    withdraw(given.ledger, PrivacyUnit.CLIENT, [CLIENTS - 1])
    app = DPFedAvg.client_app(task())
    initial = ArrayRecord(task().initial_params(0))
    strategy = FederatedStrategy(DPFedAvg(), plan(), budget=given, timeout=1.0)
    strategy.start(InProcessGrid(app, CLIENTS - 1), initial, num_rounds=1)
    assert strategy.participations.rounds == 1
    another = FederatedStrategy(DPFedAvg(), plan(), budget=given, timeout=1.0)
    with pytest.raises(RuntimeError, match="of 6 nodes connected"):
        another.start(InProcessGrid(app, CLIENTS - 2), initial, num_rounds=1)


class Late(InProcessGrid):
    """Some nodes connect first, all others when the server has asked these for their partitions."""

    def __init__(self, *given, first, never=(), **options):
        super().__init__(*given, **options)
        self.first, self.never = {1_000 + p for p in first}, {1_000 + p for p in never}
        self.has_asked = False

    def get_node_ids(self):
        nodes = self.contexts if self.has_asked else self.first
        return [node for node in nodes if node not in self.never]

    def send_and_receive(self, messages, *, timeout=None):
        self.has_asked = True
        return super().send_and_receive(messages, timeout=timeout)


@pytest.mark.parametrize("has_node", [True, False], ids=["node stays", "node is gone"])
@pytest.mark.parametrize("method", [FedAMP, Apple])
def test_uploads_of_a_withdrawn_client_influence_no_later_message(tmp_path, method, has_node):
    """Whatever it uploaded before its withdrawal, all other clients then receive the same."""
    received, last = [], CLIENTS - 1
    for shift in (0.0, 50.0):
        folder = tmp_path / str(shift)
        given = Budget(epsilon=1e6, delta=DELTA, ledger=folder / "study.jsonl")
        app = method.client_app(task(), allow_seeded_noise=True)

        def strategy(directory, given=given):
            chosen = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
            options = {"budget": given, "directory": directory, "timeout": 1.0, "seed": 3}
            return strategy_of(method, plan=chosen, **options)

        class Shifting(Recorder):
            def send_and_receive(self, messages, shift=shift, **how):
                replies = list(super().send_and_receive(messages, **how))
                for reply in replies:
                    if reply.metadata.src_node_id == 1_000 + last and "update" in reply.content:
                        moved = {
                            n: Array(a.numpy() + np.float32(shift))
                            for n, a in reply.content["update"].items()
                        }
                        reply.content["update"] = ArrayRecord(moved)
                return replies

        initial, node = (
            ArrayRecord(task().initial_params(0)),
            {"state-folder": str(folder / "nodes")},
        )
        run = RunWriter.create(folder / "run", config={})
        strategy(run).start(Shifting(app, CLIENTS, node), initial, num_rounds=1)
        run.close()
        withdraw(given.ledger, PrivacyUnit.CLIENT, [last])
        run = RunWriter.resume(folder / "run")
        grid = Recorder(app, CLIENTS if has_node else CLIENTS - 1, node)
        strategy(run).start(grid, initial, num_rounds=2)
        run.close()
        sent = [m for m in grid.sent if m.metadata.message_type.startswith("train")]
        assert len(sent) == CLIENTS - 1
        groups = [group for message in sent for group in message.content.array_records.values()]
        received.append([array.numpy() for group in groups for array in group.values()])
    for one, other in zip(*received, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("method", [FedAMP, Apple])
def test_no_checkpoint_keeps_the_upload_of_a_client_that_withdrew(tmp_path, method):
    given, folder = budget(tmp_path), tmp_path / "a"
    chosen = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    how = {"plan": chosen, "method": method, "state": tmp_path / "nodes"}

    def uploads():
        files = sorted((folder / "checkpoints").glob("*.checkpoint"))
        states = [State.of_groups(deserialised(file.read_bytes()).arrays) for file in files]
        groups = [
            {name.removeprefix("uploaded."): arrays for name, arrays in state.server.items()}
            for state in states
        ]
        arrays = [group.get(str(LEAVING), {}) for group in groups]
        return {a.tobytes() for each in arrays for a in each.values()}

    run_of(folder, given, **how, rounds=2)
    before = uploads()
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    run_of(folder, given, **how, rounds=3)
    assert before
    assert not before & uploads()
    run_of(folder, given, **how, rounds=5)  # later, each checkpoint keeps the one before
    assert len([*(folder / "checkpoints").glob("*.checkpoint")]) == 2


@pytest.mark.parametrize("chosen", [PLANS[0], PLANS[-1]])
def test_a_resumed_run_whose_account_is_lost_asks_nobody(tmp_path, chosen):
    given, folder, asked = budget(tmp_path), tmp_path / "a", []
    run_of(folder, given, plan=chosen)
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    given.ledger.unlink()

    class Asked(Watching):
        def send_and_receive(self, messages, **how):
            asked.append(messages)
            return super().send_and_receive(messages, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "Watching", Asked)
        with pytest.raises(InvalidValue, match="has 0 of at least 1 training rounds"):
            run_of(folder, given, plan=chosen, rounds=3)
    assert not asked


@pytest.mark.parametrize("missing", [(), (0,)], ids=["late", "never"])
def test_a_withdrawn_clients_node_does_not_replace_a_late_node(tmp_path, missing):
    given = budget(tmp_path)
    run_of(tmp_path / "a", given, plan=plan())
    withdraw(given.ledger, PrivacyUnit.CLIENT, [CLIENTS - 1])
    grid = Late(DPFedAvg.client_app(task()), CLIENTS, first=range(1, CLIENTS), never=missing)
    strategy = FederatedStrategy(DPFedAvg(), plan(), budget=given, timeout=1.0)
    initial = ArrayRecord(task().initial_params(0))
    if missing:
        with pytest.raises(FederationNotReady, match=r"partitions \[0\]"):
            strategy.start(grid, initial, num_rounds=1)
        return
    strategy.start(grid, initial, num_rounds=1)
    assert strategy.participations.rounds == 1
    assert sorted(strategy.run.clients.nodes) == [*range(CLIENTS - 1)]


def test_a_node_whose_owner_keeps_memory_deletes_nothing_and_ends_no_run(tmp_path):
    given, state = budget(tmp_path), tmp_path / "nodes"
    chosen = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    run_of(tmp_path / "a", given, plan=chosen, method=FedPer, state=state)
    withdraw(given.ledger, PrivacyUnit.CLIENT, [LEAVING])
    settings = {"keep-memory": True, "state-folder": str(state)}
    before = sorted(path.name for path in state.glob("*/*-*"))
    grid = InProcessGrid(FedPer.client_app(task()), CLIENTS)
    for context in grid.contexts.values():
        context.node_config |= settings
    strategy = FederatedStrategy(FedPer(), chosen, budget=given, timeout=5.0)
    strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=1)
    assert set(before) <= {path.name for path in state.glob("*/*-*")}
    assert forgotten(Ledger.read(given.ledger)) == set()
    assert any("keep-memory" in refusal for refusal in strategy.refusals)
    assert strategy.participations.rounds == 1


SMALL_NUMBER = 1
"""Number of a user that is also the number of a silo: a mistaken silo then leaves in its place."""
DP_SGD = DpSgdTraining(
    noise_multiplier=1.0,
    sampling_rate=0.5,
    steps=2,
    batch_size=10.0,
    learning_rate=0.2,
    clipping_norm=0.3,
)


def of_users(method, given, *, secure=False, **options) -> FederatedStrategy:
    """Return a strategy with users in silos, under a plan that fits the method."""
    common = {"budget": given, "num_silos": silos.SILOS, "evaluate_every": 0, **options}
    if method is UldpGroup:
        group = {"num_users": silos.USERS, "group_size": 3, "local": DP_SGD, "delta": 1e-5}
        return group_strategy(**group, **common)
    placement = SecureSum(colluding=0.0, dropouts=0.0) if secure else "client"
    chosen = silos.plan(noise_placement=placement, noise_multiplier=0.4)
    return strategy_of(method, plan=chosen, local=silos.LOCAL, **common)


@pytest.mark.parametrize(
    ("secure", "method"),
    grid_of(
        [*product([False, True], [UldpAvg, UldpNaive]), (False, UldpGroup)],
        lambda case: case[0] == (case[1] is UldpAvg),
    ),
)
def test_a_user_that_withdrew_counts_as_one_whose_records_every_silo_deleted(
    tmp_path, method, secure
):
    user, models, guarantees = SMALL_NUMBER, [], []
    everybody = silos.silos()
    assert any((data.owners == user).any() for data in everybody)
    for name, data in (("withdrawn", everybody), ("gone", [d.without([user]) for d in everybody])):
        (tmp_path / name).mkdir()
        given = Budget(epsilon=1e6, delta=0.1, ledger=tmp_path / name / "study.jsonl")
        given.ledger.touch()
        if name == "withdrawn":
            withdraw(given.ledger, PrivacyUnit.USER, [user])
        strategy = of_users(method, given, secure=secure, seed=silos.SEED, seeded_noise=True)
        app = method.client_app(silos.task(data), allow_seeded_noise=True)
        grid = InProcessGrid(app, silos.SILOS)
        initial = ArrayRecord(silos.task().initial_params(0))
        result = strategy.start(grid, initial, num_rounds=2)
        models.append(result.arrays.to_torch_state_dict())
        guarantees.append(strategy.guarantees())
        assert (strategy.refusals, forgotten(Ledger.read(given.ledger))) == ([], set())
        took_part = set(range(silos.USERS)) - ({user} if name == "withdrawn" else set())
        assert set(strategy.participations.uploads) == took_part
    assert guarantees[0] == guarantees[1]
    for name, array in models[0].items():
        np.testing.assert_allclose(array.numpy(), models[1][name].numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", [UldpAvg, UldpNaive, UldpGroup])
def test_every_silo_leaves_out_a_user_that_withdraws_during_a_run(tmp_path, method):
    account = tmp_path / "study.jsonl"
    account.touch()
    strategy = of_users(method, Budget(epsilon=1e6, delta=0.1, ledger=account))
    app = method.client_app(silos.task())
    grid = Leaving(app, silos.SILOS, account=account, user=SMALL_NUMBER, rounds_=1)
    strategy.start(grid, ArrayRecord(silos.task().initial_params(0)), num_rounds=2)
    trained = [m for m in grid.sent if m.metadata.message_type.startswith("train")]
    left = [list(message.content["round"].get("withdrawn", ())) for message in trained]
    assert left == [[]] * silos.SILOS + [[SMALL_NUMBER]] * silos.SILOS
    assert (strategy.refusals, strategy.participations.rounds) == ([], 2)


@pytest.mark.parametrize("secure", [False, True])
def test_a_withdrawal_takes_effect_in_a_whole_round_or_not_at_all(tmp_path, secure, monkeypatch):
    """Here the account lists another withdrawal at each reading."""
    account = tmp_path / "study.jsonl"
    account.touch()
    given = Budget(epsilon=1e6, delta=0.1, ledger=account)
    strategy, readings = of_users(UldpAvg, given, secure=secure), iter(range(silos.USERS))
    monkeypatch.setattr(
        Spending, "withdrawn", property(lambda spending: frozenset(range(next(readings))))
    )
    grid = Recorder(UldpAvg.client_app(silos.task()), silos.SILOS)
    strategy.start(grid, ArrayRecord(silos.task().initial_params(0)), num_rounds=1)
    left = [
        set(message.content["round"]["withdrawn"])
        for message in grid.sent
        if message.metadata.message_type.startswith("train")
    ]
    drawn = set(strategy.newest_round.cohort.units)
    assert left == [left[0]] * silos.SILOS
    assert drawn == set(range(silos.USERS)) - left[0]


def test_no_silo_evaluates_a_training_loss_on_records_of_a_withdrawn_user(tmp_path):
    user, losses = SMALL_NUMBER, []
    everybody = silos.silos()
    for name, data in (("withdrawn", everybody), ("gone", [d.without([user]) for d in everybody])):
        (tmp_path / name).mkdir()
        given = Budget(epsilon=1e6, delta=0.1, ledger=tmp_path / name / "study.jsonl")
        given.ledger.touch()
        if name == "withdrawn":
            withdraw(given.ledger, PrivacyUnit.USER, [user])
        strategy = of_users(UldpAvg, given, evaluate_every=1, training_loss=True, seed=silos.SEED)
        grid = InProcessGrid(UldpAvg.client_app(silos.task(data)), silos.SILOS)
        initial = ArrayRecord(silos.task().initial_params(0))
        content = strategy.configure_evaluate(0, initial, ConfigRecord(), grid)
        strategy.aggregate_evaluate(0, strategy.run.clients.replies(content))
        scores = strategy.run.client_metrics
        losses.append({silo: each["training_loss"] for silo, each in scores.items()})
    assert len(losses[0]) == silos.SILOS
    assert losses[0] == losses[1]


def test_a_silo_whose_records_name_no_users_refuses_after_a_withdrawal(tmp_path):
    account = tmp_path / "study.jsonl"
    account.touch()
    withdraw(account, PrivacyUnit.USER, [SMALL_NUMBER])
    strategy = of_users(UldpNaive, Budget(epsilon=1e6, delta=0.1, ledger=account))
    data = [ClientData(train=one.train, test=one.test) for one in silos.silos()]
    grid = InProcessGrid(UldpNaive.client_app(silos.task(data)), silos.SILOS)
    with pytest.raises(FederationNotReady, match="expected SiloData, because users withdrew"):
        strategy.start(grid, ArrayRecord(silos.task().initial_params(0)), num_rounds=2)


class Leaving(Recorder):
    """One user withdraws after ``rounds_`` rounds of training."""

    def __init__(self, *given, account, user, rounds_, **options):
        super().__init__(*given, **options)
        self.account, self.user, self.rounds = account, user, rounds_
        self.leave_in_time(0)

    def leave_in_time(self, done):
        if done == self.rounds:
            withdraw(self.account, PrivacyUnit.USER, [self.user])

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        trained = [m for m in self.sent if m.metadata.message_type.startswith("train")]
        if replies[0].metadata.message_type.startswith("train"):
            self.leave_in_time(len(trained) // silos.SILOS)
        return replies


LEFT = 7


@pytest.mark.parametrize(
    ("rounds", "make"),
    grid_of(product([0, 1], [make_openly, make]), lambda case: case[0] == (case[1] is make)),
)
def test_no_silo_counts_or_trains_on_records_of_a_user_that_withdrew(
    tmp_path, make, rounds, monkeypatch
):
    """Silos counted the records at the set-up, so a later withdrawal changes no other's weight."""
    counted, trained = [], []
    count, read = torch.bincount, SiloData.by_user

    def counts(owners, **options):
        counted.append(count(owners, **options))
        return counted[-1]

    def users(data):
        trained.append(read(data))
        return trained[-1]

    monkeypatch.setattr(torch, "bincount", counts)
    monkeypatch.setattr(SiloData, "by_user", users)
    account = tmp_path / "study.jsonl"
    account.touch()
    given = Budget(epsilon=1e6, delta=0.1, ledger=account)
    strategy = make(budget=given, evaluate_every=0)
    start(strategy, Leaving, rounds=2, account=account, user=LEFT, rounds_=rounds)
    assert strategy.refusals == []
    assert not any(row.get("discarded") for row in [strategy.run.progress.row])
    held = sum(int(one[LEFT]) for one in counted)
    assert (held > 0) == (rounds > 0)
    with_user = [LEFT in each for each in trained]
    assert any(with_user[: silos.SILOS]) == (rounds > 0)
    assert not any(with_user[silos.SILOS * rounds :])


def test_data_without_a_user_keep_the_order_of_all_others():
    data = silos.silo(1)
    left = data.without([3, 5])
    kept = ~((data.owners == 3) | (data.owners == 5))
    assert torch.equal(left.owners, data.owners[kept])
    assert torch.equal(left.train.features, data.train.features[kept])
    assert left.test is data.test
    assert data.without([]) is data
    small = replace(data, owners=data.owners.to(torch.uint8))
    assert torch.equal(small.without([3, 5, 70_000]).owners.long(), data.owners[kept])
