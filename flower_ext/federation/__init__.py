"""The Flower glue that every algorithm shares."""

from flower_ext.federation.client import (
    ClientMethod,
    ClientWork,
    LocalResult,
    Question,
    client_app,
    unmoved_by_errors,
)
from flower_ext.federation.cohort import FederationNotReady
from flower_ext.federation.configured import (
    basis_of,
    budget_of,
    delta_of,
    dp_sgd_of,
    options_of,
    perturbation_plan_of,
    record_level_plan_of,
    release_plan_of,
    run_recorded,
    sampling_of,
    training_of,
)
from flower_ext.federation.engines.in_process import InProcessGrid, run_in_process
from flower_ext.federation.engines.virtual import VirtualGrid, clients_of
from flower_ext.federation.mods import objective_perturbation_term, output_perturbation_mod
from flower_ext.federation.progress import Remaining
from flower_ext.federation.protection import HiddenSum
from flower_ext.federation.recording import (
    first_config,
    recorded_run,
    save_outcome,
    settings_of,
    shared_budget,
)
from flower_ext.federation.records import RefusedReply
from flower_ext.federation.state.memory import ClientMemory, ClientVault
from flower_ext.federation.stragglers import Stragglers
from flower_ext.federation.strategy import FederatedStrategy
from flower_ext.training.side_by_side import Steps, Training

__all__ = [
    "ClientMemory",
    "ClientMethod",
    "ClientVault",
    "ClientWork",
    "FederatedStrategy",
    "FederationNotReady",
    "HiddenSum",
    "InProcessGrid",
    "LocalResult",
    "Question",
    "RefusedReply",
    "Remaining",
    "Steps",
    "Stragglers",
    "Training",
    "VirtualGrid",
    "basis_of",
    "budget_of",
    "client_app",
    "clients_of",
    "delta_of",
    "dp_sgd_of",
    "first_config",
    "objective_perturbation_term",
    "options_of",
    "output_perturbation_mod",
    "perturbation_plan_of",
    "record_level_plan_of",
    "recorded_run",
    "release_plan_of",
    "run_in_process",
    "run_recorded",
    "sampling_of",
    "save_outcome",
    "settings_of",
    "shared_budget",
    "training_of",
    "unmoved_by_errors",
]
