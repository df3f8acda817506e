"""Flower's strategies, really run: their noise, their ε, and what the documentation says."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import (
    Grid,
    ServerApp,
)
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)

from flower_ext.federation import InProcessGrid, run_in_process
from flower_ext.privacy import Ledger, gaussian_loss
from flower_ext_check.accountant import PldAccountant
from plugins.check.tests.flower_noise import DELTA, config

CLIENTS, NORM = 4, 1.0


def app(
    model=lambda received, partition: {n: a + 1.0 for n, a in received.items()},
    sizes=None,
    mods=None,
):
    client = ClientApp(mods=mods)

    @client.train()
    def _(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        received = {n: a.numpy() for n, a in message.content["arrays"].items()}
        arrays = {n: Array(np.asarray(a)) for n, a in model(received, partition).items()}
        metrics = MetricRecord({"num-examples": sizes[partition] if sizes else 1})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    return client


ByServer = DifferentialPrivacyServerSideFixedClipping
ByClients = DifferentialPrivacyClientSideFixedClipping


def flowers_strategy(accounted=None, noise=1.0, kind=ByServer):
    plain = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    return kind(plain, noise, NORM, CLIENTS, accountant=accounted)


def start(**arrays) -> ArrayRecord:
    arrays = arrays or {"w": np.zeros(50, np.float32)}
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


@pytest.mark.parametrize(("kind", "mods"), [(ByServer, []), (ByClients, [fixedclipping_mod])])
def test_a_real_run_ends_before_the_round_that_would_exceed_the_budget(kind, mods, tmp_path):
    allowed = gaussian_loss(1.0, releases=3, delta=DELTA).epsilon
    ledger, trained, released = Ledger(tmp_path / "ledger.jsonl"), [], []
    ours = PldAccountant(config(population=CLIENTS, max_epsilon=allowed), ledger=ledger)

    def model(received, partition):
        trained.append(partition)
        return {n: a + 1.0 for n, a in received.items()}

    server = ServerApp()

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        flowers_strategy(ours, kind=kind).start(
            grid, start(), num_rounds=5, evaluate_fn=lambda n, arrays: released.append(n)
        )

    with pytest.raises(PrivacyBudgetExhausted, match="would exceed max_epsilon"):
        run_in_process(server, app(model, mods=mods), num_clients=CLIENTS)
    assert len(trained) == 3 * CLIENTS
    assert released == [0, 1, 2, 3]
    assert ours.num_releases == ledger.releases == 3
    assert ours.guarantee().epsilon <= allowed


def test_a_release_that_cannot_be_written_down_is_not_made(tmp_path):
    ledger, released = Ledger(tmp_path / "ledger.jsonl"), []
    ours = PldAccountant(config(population=CLIENTS), ledger=ledger)
    ledger.close()
    with pytest.raises(RuntimeError, match="was closed"):
        flowers_strategy(ours).start(
            InProcessGrid(app(), CLIENTS),
            start(),
            num_rounds=1,
            evaluate_fn=lambda n, arrays: released.append(n),
        )
    assert released == [0]
    assert ours.num_releases == 0


def test_a_round_that_lacks_a_reply_releases_and_charges_nothing():
    def model(received, partition):
        if partition == 1:
            raise ValueError
        return received

    ours = PldAccountant(config(population=CLIENTS))
    result = flowers_strategy(ours).start(InProcessGrid(app(model), CLIENTS), start(), num_rounds=1)
    assert not result.train_metrics_clientapp
    assert ours.num_releases == 0


def released_by_flower(client: ClientApp, initial: ArrayRecord, accounted=None):
    strategy = flowers_strategy(accounted, noise=1e-6)
    return strategy.start(InProcessGrid(client, CLIENTS), initial, num_rounds=1).arrays


def test_flower_does_not_clip_an_array_without_a_dimension():
    initial = start(t=np.array(0.0, np.float32), w=np.zeros(3, np.float32))
    loud = app(lambda received, p: {"t": received["t"] + 4e3, "w": received["w"]})
    moved = released_by_flower(loud, initial)["t"].numpy()
    assert moved > 1e3 * NORM


def test_flower_lets_nan_through_to_everybody():
    one = app(lambda r, p: {"w": r["w"] + (np.nan if p == 1 else 1.0)})
    assert np.isnan(released_by_flower(one, start())["w"].numpy()).all()


def test_flower_ends_with_a_division_by_zero_where_a_client_learned_nothing():
    still = app(lambda received, partition: received)
    with pytest.raises(ZeroDivisionError):
        released_by_flower(still, start())


def test_flower_weighs_by_examples_without_an_accountant_and_ends_with_one():
    sizes = [1000, 1, 1, 1]
    one = app(lambda r, p: {"w": r["w"] + (10.0 if p == 0 else 1e-6)}, sizes)
    moved = released_by_flower(one, start())["w"].numpy()
    assert np.linalg.norm(moved) == pytest.approx(NORM, rel=0.02)  # and not NORM / CLIENTS
    ours = PldAccountant(config(population=CLIENTS))
    with pytest.raises(ValueError, match="equal client weights"):
        released_by_flower(one, start(), ours)


def test_flower_accounts_a_client_without_clipping_mod_as_clipped():
    ours = PldAccountant(config(population=CLIENTS))
    strategy = flowers_strategy(ours, noise=1e-6, kind=ByClients)
    loud = app(lambda r, p: {"w": r["w"] + (1e3 if p == 0 else 0.0)})
    result = strategy.start(InProcessGrid(loud, CLIENTS), start(), num_rounds=1)
    assert np.linalg.norm(result.arrays["w"].numpy()) > 1e3 * NORM
    assert ours.num_releases == 1
