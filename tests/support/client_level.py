"""Plans and apps for tests of the mod of client-level privacy."""

from functools import partial

import numpy as np
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, InProcessGrid, client_level_dp_mod
from flower_ext.federation.messages import records
from flower_ext.federation.messages.for_mods import FOR_MODS
from flower_ext.federation.messages.round_entries import RoundEntries
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from tests.support.plans import release_plan
from tests.support.travelling import Recorder

CLIENTS = 4
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


plan = partial(release_plan, CLIENTS, rounds=2, delta=1e-5)


def start() -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in START.items()})


def run(app: ClientApp, strategy=None, rounds: int = 2, grid=None):
    strategy = strategy or FederatedStrategy(DPFedAvg(), plan(), evaluate_every=0)
    grid = grid or Recorder(app, num_clients=CLIENTS)
    return strategy.start(grid, start(), num_rounds=rounds), strategy, grid


TIGHT = ClipAndNoise(clipping_norm=1.0, noise_stddev=1e-6)


def ask(model, returned, protection=TIGHT, **facts) -> Message:
    """Return the answer of a client behind the mod to one message of a round."""
    app = foreign_app(lambda received, partition: returned)
    grid = InProcessGrid(app, num_clients=1)
    (node,) = grid.get_node_ids()
    entries = RoundEntries(number=1, seed=0, protection=protection).to_record()
    content = {
        records.MODEL: ArrayRecord({n: Array(a) for n, a in model.items()}),
        records.CONFIG: ConfigRecord(
            {f"{FOR_MODS}{name}": value for name, value in {**entries, **facts}.items()}
        ),
    }
    message = Message(RecordDict(content), dst_node_id=node, message_type="train", group_id="1")
    (reply,) = grid.send_and_receive([message])
    return reply
