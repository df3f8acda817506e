"""Small Flower apps as people publish them, written from one template with variants."""

from pathlib import Path
from textwrap import dedent, indent

_PROJECT = """
[project]
name = "{name}"
version = "1.0.0"

[tool.flwr.app]
publisher = "somebody"

[tool.flwr.app.components]
serverapp = "somebodys.server_app:app"
clientapp = "somebodys.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 5
{config}
"""

_SERVER = """
import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, NeighboringRelation, PrivacyConfig, SamplingMethod, ServerApp
from flwr.serverapp.strategy import *
from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import FullParticipation, ReleasePlan
from flower_ext_check.accountant import PldAccountant
{server_code}
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    num_rounds = context.run_config["num-server-rounds"]
    model = torch.nn.Linear(30, 10)
    strategy = FedAvg(fraction_evaluate={evaluated})
{strategy}
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=num_rounds,
    )
{after}
"""

_CLIENT = """
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import *
from flower_ext.federation import client_level_dp_mod
{client_code}
app = ClientApp({mods})


def load_data(context: Context):
    generator = torch.Generator().manual_seed(4321 + context.node_config["partition-id"])
    x = torch.randn(40 + {spread} * context.node_config["partition-id"], 30, generator=generator)
    return x, (x[:, 0] > 0).long()


@app.train()
def train(msg: Message, context: Context) -> Message:
    model = torch.nn.Linear(30, 10)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = load_data(context)
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = {{{metrics}}}
    content = {{
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord(metrics),
    }}
{train_code}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    model = torch.nn.Linear(30, 10)
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = load_data(context)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(x), y).item()
    metrics = MetricRecord({{"eval_loss": loss, "num-examples": len(x)}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=msg)
"""


def write_app(
    folder: Path,
    *,
    strategy: str = "",
    mods: str = "",
    metrics: str = '"num-examples": 1',
    config: str = "",
    evaluated: float = 0.0,
    spread: int = 0,
    server_code: str = "",
    client_code: str = "",
    train_code: str = "",
    after: str = "",
) -> Path:
    """Write an app; each argument is source, or a number, of its variant."""
    package = folder / "somebodys"
    package.mkdir(parents=True)
    name = folder.name.replace("_", "-")
    (folder / "pyproject.toml").write_text(_PROJECT.format(name=name, config=config))
    (package / "__init__.py").write_text("")
    server = _SERVER.format(
        server_code=dedent(server_code),
        evaluated=evaluated,
        strategy=indent(dedent(strategy), "    "),
        after=indent(dedent(after), "    "),
    )
    client = _CLIENT.format(
        client_code=dedent(client_code),
        mods=f"mods=[{mods}]" if mods else "",
        metrics=metrics,
        spread=spread,
        train_code=indent(dedent(train_code), "    "),
    )
    (package / "server_app.py").write_text(server)
    (package / "client_app.py").write_text(client)
    return folder


_LEGACY_SERVER = """
from flwr.common import Context
from flwr.server import Grid, LegacyContext, ServerApp, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0, min_available_clients=4)
    legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=5), strategy=strategy)
    DefaultWorkflow(fit_workflow=SecAggPlusWorkflow(3, 2))(grid, legacy)
"""
_LEGACY_CLIENT = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.client.mod import secaggplus_mod


class Client(NumPyClient):
    def get_parameters(self, config):
        return [np.zeros((3, 4), np.float32)]

    def fit(self, parameters, config):
        return [parameters[0] + 1], 10, {}


app = ClientApp(client_fn=lambda context: Client().to_client(), mods=[secaggplus_mod])
"""


def write_secaggplus_app(folder: Path) -> Path:
    """Write an app of Flower's older interface, with Flower's own secure sums."""
    app = write_app(folder)
    (app / "somebodys" / "server_app.py").write_text(_LEGACY_SERVER)
    (app / "somebodys" / "client_app.py").write_text(_LEGACY_CLIENT)
    return app


CLIENTS = 6

ACCOUNTED = """
accountant = PldAccountant(PrivacyConfig(
    target_delta=1e-5,
    population_size=6,
    neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    sampling_method=SamplingMethod.NO_AMPLIFICATION,
))
strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 4.0, 0.5, 6, accountant=accountant)
"""
PLANNED = """
plan = ReleasePlan(
    noise_multiplier=1.343, delta=1e-5, clipping_norm=0.5, rounds=num_rounds,
    sampling=FullParticipation(population=6),
)
strategy = FederatedStrategy(DPFedAvg(), plan, evaluate_every=0)
"""
CLAIM = "epsilon = 8.0\ndelta = 1e-5"

PUBLIC = {
    "quickstart": {
        "metrics": '"train_loss": loss.item(), "num-examples": len(x)',
        "evaluated": 1.0,
        "spread": 1,
    },
    "server_side_fixed": {"strategy": ACCOUNTED},
    "server_side_unaccounted": {
        "strategy": "strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 0.5, 6)",
        "metrics": '"num-examples": len(x)',
        "spread": 1,
    },
    "client_side_fixed": {
        "strategy": "strategy = DifferentialPrivacyClientSideFixedClipping(strategy, 1.0, 0.5, 6)",
        "mods": "fixedclipping_mod",
    },
    "client_side_without_mod": {
        "strategy": "strategy = DifferentialPrivacyClientSideFixedClipping(strategy, 1.0, 0.5, 6)",
        "config": CLAIM,
    },
    "adaptive_server_side": {
        "strategy": "strategy = DifferentialPrivacyServerSideAdaptiveClipping(strategy, 0.4, 6)",
        "config": CLAIM,
    },
    "adaptive_client_side": {
        "strategy": "strategy = DifferentialPrivacyClientSideAdaptiveClipping(strategy, 0.4, 6)",
        "mods": "adaptiveclipping_mod",
        "config": CLAIM,
    },
    "flip": {"mods": "LocalDpMod(1.0, 1e-4, 10.0, 1e-5)"},
    "central_with_counts": {
        "strategy": ACCOUNTED,
        "train_code": """
            for label in range(2):
                metrics[f"class_{label}"] = int((y == label).sum())
            content["metrics"] = MetricRecord(metrics)
        """,
    },
    "opacus_in_the_client": {
        "client_code": """
            from opacus import PrivacyEngine
            from torch.utils.data import DataLoader, TensorDataset
        """,
        "train_code": """
            engine = PrivacyEngine(accountant="rdp")
            private = torch.nn.Linear(30, 10)
            private.load_state_dict(msg.content["arrays"].to_torch_state_dict())
            private, optimizer, loader = engine.make_private(
                module=private,
                optimizer=torch.optim.SGD(private.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(x, y), batch_size=20),
                noise_multiplier=1.5,
                max_grad_norm=1.0,
            )
            for batch, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(private(batch), labels).backward()
                optimizer.step()
            print(f"epsilon = {engine.get_epsilon(1e-5):.2f}, delta = 1e-5")
            content["arrays"] = ArrayRecord(private._module.state_dict())
        """,
    },
    "example_weights": {
        "strategy": "strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 0.5, 6)",
        "metrics": '"num-examples": len(x)',
        "config": CLAIM,
    },
}
"""Variants by name, as arguments of `write_app`."""

_OUTER = """
SEEN = {}


def seeing(msg, context, call_next):
    reply = call_next(msg, context)
    sent, got = reply.content["arrays"], msg.content["arrays"]
    SEEN["update"] = {k: sent[k].numpy() - got[k].numpy() for k in sent}
    SEEN["metrics"] = reply.content["metrics"]
    SEEN["calls"] = SEEN.get("calls", 0) + 1
    return reply


def spoiling(msg, context, call_next):
    reply = call_next(msg, context)
    if msg.metadata.message_type.startswith("train") and "update" in reply.content:
        update = {k: v.numpy() for k, v in reply.content["update"].items()}
        spoiled = spoil(update, reply, msg)
        reply.content["update"] = ArrayRecord({k: Array(v) for k, v in spoiled.items()})
    return reply


def total(update):
    return float(np.sqrt(1e-12 + sum((v.astype(float) ** 2).sum() for v in update.values())))


def spoil(update, reply, msg):
"""
_SPOILED = "spoiling, client_level_dp_mod(), seeing"


def _spoiled(body: str) -> dict[str, str]:
    return {"mods": _SPOILED, "client_code": _OUTER + indent(dedent(body), "    ")}


CLEAN = {"strategy": PLANNED, "mods": "client_level_dp_mod()", "config": CLAIM}
"""An app whose claim is provable."""

FAULTS = {
    "clip_after_noise": (
        "noise-small",
        _spoiled(
            """
            factor = min(1, 0.5 / total(update))
            return {k: (v * factor).astype(v.dtype) for k, v in update.items()}
            """
        ),
    ),
    "raw_update_added": (
        "unclipped",
        _spoiled("return {k: v + SEEN['update'][k] for k, v in update.items()}"),
    ),
    "noise_for_half_the_norm": (
        "noise-small",
        _spoiled(
            """
            raw = SEEN["update"]
            clipped = {k: min(1, 0.5 / total(raw)) * v for k, v in raw.items()}
            return {k: (v + clipped[k]) / 2 for k, v in update.items()}
            """
        ),
    ),
    "seeded_noise": (
        "seeded-noise",
        {
            "strategy": PLANNED.replace(
                "evaluate_every=0", "evaluate_every=0, seed=1, seeded_noise=True"
            ),
            "mods": "client_level_dp_mod(allow_seeded_noise=True)",
        },
    ),
    "exact_loss": (
        "metrics",
        _spoiled(
            """
            reply.content["metrics"] = MetricRecord({"train_loss": total(SEEN["update"])})
            return update
            """
        ),
    ),
    "no_noise_in_round_1": (
        "noise-missing",
        _spoiled(
            """
            raw = SEEN["update"]
            first = SEEN["calls"] <= 12  # with the rehearsal
            return {k: min(1, 0.5 / total(raw)) * v for k, v in raw.items()} if first else update
            """
        ),
    ),
    "nan_passes": (
        "nan",
        _spoiled("return update if np.isfinite(total(SEEN['update'])) else SEEN['update']"),
    ),
    "weighted_by_examples": (
        "weights",
        {
            **_spoiled(
                """
                weight = SEEN["metrics"]["num-examples"] / 40
                return {k: (v * weight).astype(v.dtype) for k, v in update.items()}
                """
            ),
            "metrics": '"num-examples": len(x)',
            "spread": 1,
        },
    ),
    "fixed_generator": (
        "seeded-noise",
        _spoiled(
            """
            raw, rng = SEEN["update"], np.random.default_rng(42)
            return {
                k: (min(1, 0.5 / total(raw)) * v + rng.normal(0, 0.3, v.shape)).astype(v.dtype)
                for k, v in raw.items()
            }
            """
        ),
    ),
    "second_record": (
        "records",
        _spoiled(
            """
            reply.content["more"] = ArrayRecord({k: Array(v) for k, v in SEEN["update"].items()})
            return update
            """
        ),
    ),
    "another_delta": ("", {"config": "epsilon = 8.0\ndelta = 1e-9"}),
    "more_rounds_than_planned": ("", {"strategy": PLANNED + "num_rounds = 9"}),
    "error_tells": (
        "names",
        _spoiled(
            """
            reply.content["metrics"] = MetricRecord({f"norm {total(SEEN['update'])}": 1})
            return update
            """
        ),
    ),
    "noise_halved_after_its_guarantee": (
        "epsilon",
        {
            "server_code": """
                from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
                whole = NoisedSum.client_noise_stddev
                NoisedSum.client_noise_stddev = lambda self, size: whole(self, size) / 2
            """
        },
    ),
    "epsilon_of_an_accountant_of_the_app": (
        "epsilon",
        {
            "strategy": PLANNED.replace("1.343", "0.5"),
            "server_code": """
                from dataclasses import replace
                from flower_ext.privacy.theorems import claims
                truth = claims.privacy_loss_of
                claims.privacy_loss_of = (
                    lambda *given, **more: replace(truth(*given, **more), epsilon=1.0)
                )
            """,
        },
    ),
    "clipped_at_twice_the_norm": (
        "unclipped",
        {
            "client_code": """
                from flower_ext.privacy.mechanisms import protections
                short = protections.clip
                protections.clip = lambda update, norm: short(update, 2 * norm)
            """,
        },
    ),
    "guarantee_of_the_app": (
        "foreign-parts",
        {
            "server_code": """
                from dataclasses import replace

                class Mine(DPFedAvg):
                    def claims(self, *given):
                        return [replace(claim, epsilon=0.1) for claim in super().claims(*given)]
            """,
            "strategy": PLANNED.replace("DPFedAvg()", "Mine()"),
        },
    ),
    "a_method_of_the_strategy_replaced": (
        "foreign-parts",
        {
            "strategy": PLANNED
            + "strategy.run.round_noise = type(strategy.run).round_noise.__get__(strategy.run)"
        },
    ),
    "everybody_asked_in_the_place_of_a_sample": (
        "sampling",
        {
            "server_code": """
                from flower_ext.privacy import PoissonSampling
                PoissonSampling.draw = lambda self, rng, so_far=None: list(range(self.population))
            """,
            "strategy": PLANNED.replace(
                "FullParticipation(population=6)", "PoissonSampling(population=6, rate=0.05)"
            ),
        },
    ),
    "more_messages_beside_the_strategy": (
        "beside-the-strategy",
        {
            "after": """
                from flwr.app import Message, RecordDict
                content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
                list(grid.send_and_receive([
                    Message(content, dst_node_id=node, message_type="evaluate")
                    for node in grid.get_node_ids()
                ]))
            """
        },
    ),
    "two_runs": (
        "several-runs",
        {"after": PLANNED + "strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds)"},
    ),
    "strategy_overridden": (
        "unknown-strategy",
        {
            "server_code": """
                class Shown(FedAvg):
                    base = None

                    def configure_train(self, *arguments):
                        return self.base.configure_train(*arguments)

                    def aggregate_train(self, *arguments):
                        return self.base.aggregate_train(*arguments)
            """,
            "strategy": PLANNED + "wrapper = Shown(fraction_evaluate=0.0)\n"
            "wrapper.base, strategy = strategy, wrapper\n",
        },
    ),
}
"""Planted faults: the finding that names each (none: the claim alone fails), and the variant."""
