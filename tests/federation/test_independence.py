"""A client's upload depends on no other client: not on its data, its errors or its presence."""

from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

from flower_ext.algorithms import APFL, Apple, DP2FedSAM, DPDitto, DPFedAvg, FedALA, PFedMe
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, InProcessGrid, VirtualGrid
from flower_ext.federation.client.hidden_errors import hidden_errors
from flower_ext.federation.messages import records
from flower_ext.federation.messages.failures import REASON_WITHHELD
from flower_ext.privacy import (
    FullParticipation,
    RecordLevelPlan,
    ReleasePlan,
)
from flower_ext.runs import RunWriter, write_report
from flower_ext.training import LocalTraining, Task
from tests.support.grids import grid
from tests.support.strategies import strategy_of
from tests.support.worlds import CLASSES, FEATURES, Net, client_data

CLIENTS = 9
UNSTABLE = LocalTraining(epochs=6, batch_size=8, learning_rate=3.0)
"""Training in which rounding errors grow without bound."""
SGD = LocalTraining(epochs=1, batch_size=8, learning_rate=0.1)


class Convolutional(nn.Module):
    """A network that machine code cannot train."""

    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten())
        self.head = nn.Linear(4 * (FEATURES - 2), CLASSES)

    def forward(self, x):
        return self.head(self.extractor(x.unsqueeze(1)))


def uneven(client):
    """Return clients of 23 to 30 examples."""
    data = client_data(client)
    return ClientData(train=first_of(data, 30 - client % 4 * 2 - client % 2), test=data.test)


def first_of(data, count):
    return Examples(data.train.features[:count], data.train.targets[:count])


def as_is(client):
    return uneven(client)


def diverging(client):
    data = uneven(client)
    return replace(data, train=replace(data.train, features=data.train.features * 1e30))


def mislabelled(client):
    data = uneven(client)
    targets = data.train.targets.clone()
    targets[3] = CLASSES + 7
    return replace(data, train=replace(data.train, targets=targets))


def unreadable(client):
    raise OSError("the disk is gone")


def of_another_size(client):
    data = uneven(client)
    return replace(data, train=first_of(data, 5))


def of_another_shape(client):
    data = uneven(client)
    return replace(data, train=replace(data.train, features=data.train.features[:, :3]))


def empty(client):
    data = uneven(client)
    return replace(data, train=first_of(data, 0))


ODD = [diverging, mislabelled, unreadable, of_another_size, of_another_shape, empty]


def release_plan(placement):
    return ReleasePlan(
        sampling=FullParticipation(CLIENTS),
        rounds=3,
        delta=1e-5,
        clipping_norm=1.0,
        noise_multiplier=1.0,
        noise_placement=placement,
    )


def record_plan():
    return RecordLevelPlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=1.0,
        noise_stddev=1.0,
        num_examples=30,
        rounds=3,
        delta=1e-5,
    )


METHODS = {
    "DP-FedAvg": lambda **how: strategy_of(
        DPFedAvg, plan=release_plan("client"), local=UNSTABLE, **how
    ),
    "server noise": lambda **how: strategy_of(
        DPFedAvg, plan=release_plan("server"), local=UNSTABLE, **how
    ),
    "DP2-FedSAM": lambda **how: strategy_of(
        DP2FedSAM,
        plan=release_plan("client"),
        head=UNSTABLE,
        extractor=replace(UNSTABLE, sam_radius=0.1),
        **how,
    ),
    "DP-Ditto": lambda **how: strategy_of(
        DPDitto, plan=record_plan(), local=UNSTABLE, personal_training=UNSTABLE, **how
    ),
    "DP-pFedMe": lambda **how: strategy_of(
        PFedMe,
        plan=record_plan(),
        local=LocalTraining(epochs=1, batch_size=8, learning_rate=0.01),
        personal_training=LocalTraining(steps=5, learning_rate=0.05),
        **how,
    ),
}


def uploads(make, model, odd, *, present=True, engine=InProcessGrid):
    """Return each client's upload in one round in which client 0 is odd or absent."""

    def data(client):
        client_examples = client_data if isinstance(make().run.plan, RecordLevelPlan) else uneven
        return odd(client) if client == 0 else client_examples(client)

    strategy = make(seed=2, seeded_noise=True, evaluate_every=0)
    task = Task(model=model, data=data, device="cpu")
    app = strategy.method.client_app(task, allow_seeded_noise=True)
    grid = engine(app)
    strategy.run.progress.begin()
    initial = ArrayRecord(task.initial_params(2))
    requests = list(strategy.configure_train(1, initial, ConfigRecord(), grid))
    partitions = {node: partition for partition, node in strategy.run.clients.nodes.items()}
    requests = [m for m in requests if present or partitions[m.metadata.dst_node_id] != 0]
    replies = grid.send_and_receive(requests)
    return {
        partitions[reply.metadata.src_node_id]: None
        if reply.has_error()
        else records.to_arrays(reply.content[records.UPDATE])
        for reply in replies
    }


def in_process(app):
    return InProcessGrid(app, CLIENTS)


def on_one_node(app):
    return VirtualGrid(InProcessGrid(app, 1), CLIENTS)


def on_three_nodes(app):
    return VirtualGrid(InProcessGrid(app, 3), 3)


def in_two_processes(app):
    return InProcessGrid(app, CLIENTS, workers=2)


def one_by_one(app):
    return VirtualGrid(InProcessGrid(app, CLIENTS), 1)


def same_but_for_client_0(ours, theirs):
    """Assert that all uploads but client 0's are equal bit for bit."""
    assert ours.keys() | {0} == theirs.keys() | {0} == set(range(CLIENTS))
    for client in range(1, CLIENTS):
        assert ours[client].keys() == theirs[client].keys()
        for name, array in ours[client].items():
            assert array.tobytes() == theirs[client][name].tobytes(), (client, name)


@pytest.mark.parametrize(
    ("method", "model"),
    grid(
        [*((method, Net) for method in METHODS), ("DP-FedAvg", Convolutional)],
        lambda case: case[0] != "DP-Ditto",  # has the plan of DP-pFedMe
    ),
)
def test_no_bit_of_an_upload_depends_on_another_client(method, model):
    make = METHODS[method]
    usual = uploads(make, model, client_data, engine=in_process)
    assert all(arrays is not None for arrays in usual.values())
    absent = uploads(make, model, client_data, present=False, engine=in_process)
    assert set(absent) == set(range(1, CLIENTS))
    same_but_for_client_0(usual, absent)
    for odd in ODD:
        same_but_for_client_0(usual, uploads(make, model, odd, engine=in_process))


class WithDropout(Net):
    def forward(self, x):
        return self.head(nn.functional.dropout(self.extractor(x), 0.5, self.training))


@pytest.mark.parametrize("method", [FedALA, Apple, APFL])
def test_a_models_draws_in_a_methods_solver_depend_on_no_other_client(method):
    def second_round(*, present):
        strategy = strategy_of(
            method, plan=record_plan(), local=SGD, seed=2, seeded_noise=True, evaluate_every=0
        )
        task = Task(model=WithDropout, data=client_data, device="cpu")
        grid = in_process(strategy.method.client_app(task, allow_seeded_noise=True))
        strategy.run.progress.begin()
        arrays = ArrayRecord(task.initial_params(2))
        first = list(strategy.configure_train(1, arrays, ConfigRecord(), grid))
        arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(first))
        requests = list(strategy.configure_train(2, arrays, ConfigRecord(), grid))
        partitions = {node: partition for partition, node in strategy.run.clients.nodes.items()}
        requests = [m for m in requests if present or partitions[m.metadata.dst_node_id] != 0]
        torch.manual_seed(present)
        return {
            partitions[reply.metadata.src_node_id]: records.to_arrays(reply.content[records.UPDATE])
            for reply in grid.send_and_receive(requests)
        }

    same_but_for_client_0(second_round(present=True), second_round(present=False))


@pytest.mark.parametrize("odd", [as_is, diverging, mislabelled, unreadable])
def test_no_bit_of_an_upload_depends_on_node_and_process_layout(odd):
    make = METHODS["DP-FedAvg"]
    usual = uploads(make, Net, odd, engine=in_process)
    for engine in (on_one_node, on_three_nodes, in_two_processes):
        same_but_for_client_0(usual, uploads(make, Net, odd, engine=engine))


PATIENT = "Mrs Smith, born 1949-05-01"


def unreadable_record(client):
    raise ValueError(f"could not convert string to float: {PATIENT!r}")


def telling(client):
    """Raise an error that reveals the record by its type, its cause and several lines of text."""
    try:
        return unreadable_record(client)
    except ValueError as error:
        raise type(PATIENT, (RuntimeError,), {})(f"a\n{PATIENT}") from error


@pytest.mark.parametrize(
    "odd",
    grid([unreadable_record, telling, mislabelled, of_another_size], lambda odd: odd is telling),
)
@pytest.mark.parametrize(
    "engine",
    grid(
        [in_process, on_one_node, one_by_one, in_two_processes],
        lambda engine: engine is in_two_processes,
    ),
)
def test_no_error_reveals_a_record_in_replies_refusals_or_files(odd, engine, tmp_path):
    def data(client):
        return odd(client) if client == 0 else client_data(client)

    run = RunWriter.create(tmp_path / "run", {"method": "dp-ditto", "dataset": "digits"})
    strategy = FederatedStrategy(
        DPDitto(local=SGD, personal_training=SGD), record_plan(), directory=run
    )
    task = Task(model=Net, data=data, device="cpu")
    grid, replies = engine(DPDitto.client_app(task)), []
    plainly = grid.send_and_receive

    def watched(messages, *, timeout=None):
        replies.extend(plainly(messages, timeout=timeout))
        return replies[-len(list(messages)) :]

    grid.send_and_receive = watched
    strategy.start(grid, ArrayRecord(task.initial_params(2)), num_rounds=2)
    run.finish("failed", "; ".join(strategy.refusals))
    write_report(run)
    reasons = {reply.error.reason for reply in replies if reply.has_error()}
    if odd is of_another_size:
        (reasons,) = reasons
        assert "num_examples=30" in reasons
        assert " 5 " not in reasons
    else:  # a record that makes training raise leaves its client's model unchanged
        assert reasons == (set() if odd is mislabelled else {REASON_WITHHELD})
    assert len(strategy.refusals) >= 2 * bool(reasons)
    files = [path for path in run.path.rglob("*") if path.is_file()]
    for text in (*strategy.refusals, *(path.read_text(errors="replace") for path in files)):
        assert "Smith" not in text
        assert "out of bounds" not in text
        assert "Traceback" not in text


def test_what_a_client_withholds_is_in_its_local_log(logged):
    hidden_errors.clear()
    for _ in range(2):
        uploads(METHODS["DP-FedAvg"], Net, unreadable_record, engine=in_process)
    lines = [r for r in logged.records if "could not be loaded" in r.getMessage()]
    assert [bool(line.exc_info) for line in lines] == [True, False]
    assert not any(PATIENT in line.getMessage() for line in lines)
    assert PATIENT in str(lines[0].exc_info[1])


class Picky(nn.Module):
    """A model that refuses some inputs, in batches of clients too."""

    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(FEATURES, 200), nn.Tanh())
        self.head = nn.Linear(200, CLASSES)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("NaN")
        return self.head(self.extractor(x))


def with_wrong_targets(test):
    return Examples(test.features, test.targets + 99)


def with_wrong_features(test):
    return Examples(test.features * float("nan"), test.targets)


@pytest.mark.parametrize("odd", [with_wrong_targets, with_wrong_features])
def test_one_clients_error_changes_no_bit_of_another_clients_scores(odd):
    def scores(odd):
        def data(client):
            client_examples = client_data(client)
            return (
                replace(client_examples, test=odd(client_examples.test))
                if client == 0
                else client_examples
            )

        strategy = FederatedStrategy(DPFedAvg(), release_plan("client"), seed=2)
        task = Task(model=Picky, data=data, device="cpu")
        grid = in_process(DPFedAvg.client_app(task))
        strategy.run.progress.begin()
        initial = ArrayRecord(task.initial_params(2))
        requests = strategy.configure_evaluate(1, initial, ConfigRecord(), grid)
        return {
            reply.metadata.src_node_id: None
            if reply.has_error()
            else dict(reply.content[records.METRICS])
            for reply in grid.send_and_receive(requests)
        }

    usual, changed = scores(lambda test: test), scores(odd)
    first = min(usual)
    failed, sound = changed.pop(first), usual.pop(first)
    if odd is with_wrong_targets:  # the loss alone fails, and only the loss is missing
        assert sound.keys() - failed.keys() == {"loss"}
    else:
        assert failed is None
    assert changed == usual
