"""Strategies, client sides, engines and messages that all methods share, built on Flower."""

from flower_ext.federation.client.app import client_app
from flower_ext.federation.client.client_level_mod import client_level_dp_mod
from flower_ext.federation.client.client_method import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Memory,
    Question,
    last_trained,
    personal_model,
    personal_part,
)
from flower_ext.federation.engines.in_process import InProcessGrid, run_in_process
from flower_ext.federation.engines.virtual import VirtualGrid, clients_of
from flower_ext.federation.messages.exchange import Clients
from flower_ext.federation.messages.records import Arrays
from flower_ext.federation.messages.replies import RefusedReply
from flower_ext.federation.messages.roster import FederationNotReady
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.method import Connected, Method, Released, require_usual_server
from flower_ext.federation.method_state import State
from flower_ext.federation.population import Cohort, Population
from flower_ext.federation.recording import (
    first_config,
    node_settings,
    record,
    recorded,
    recorded_run,
)
from flower_ext.federation.server.stragglers import Stragglers
from flower_ext.federation.server_optimizers import (
    Adagrad,
    Adam,
    ExponentialAverage,
    ModelAverage,
    ServerOptimizer,
    Sgd,
    TailAverage,
    Yogi,
)
from flower_ext.federation.storage.memory import ClientMemory
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.federation.sums.summation import ClientSum, Opening, OpenSum, Summation, SumMessage
from flower_ext.federation.sums.weighted_silo import HiddenSum
from flower_ext.training.side_by_side import Steps, Training

__all__ = [
    "Adagrad",
    "Adam",
    "Arrays",
    "ClientMemory",
    "ClientMethod",
    "ClientSum",
    "ClientWork",
    "Clients",
    "Cohort",
    "Connected",
    "ExponentialAverage",
    "FederatedStrategy",
    "FederationNotReady",
    "HiddenSum",
    "InProcessGrid",
    "LocalResult",
    "Memory",
    "Method",
    "ModelAverage",
    "OpenSum",
    "Opening",
    "Population",
    "Question",
    "RefusedReply",
    "Released",
    "ServerOptimizer",
    "Sgd",
    "State",
    "Steps",
    "Stragglers",
    "SumMessage",
    "Summation",
    "TailAverage",
    "Training",
    "Update",
    "VirtualGrid",
    "Yogi",
    "client_app",
    "client_level_dp_mod",
    "clients_of",
    "first_config",
    "last_trained",
    "node_settings",
    "personal_model",
    "personal_part",
    "record",
    "recorded",
    "recorded_run",
    "require_usual_server",
    "run_in_process",
]
