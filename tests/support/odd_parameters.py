"""Models with unusual parameters."""

from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedYogi

from flower_ext.algorithms import (
    APFL,
    Apple,
    Centaur,
    DP2FedSAM,
    DPDitto,
    DPFedAvg,
    DPFedSAM,
    FedALA,
    FedAMP,
    FedDyn,
    FedPer,
    FedRep,
    Hosted,
    PFedMe,
    Scaffold,
    Upcycled,
)
from flower_ext.federation import InProcessGrid
from flower_ext.privacy import (
    FullParticipation,
    OutputPerturbation,
    PerturbationPlan,
    SecureSum,
)
from tests.faults.worlds import (
    CLIENTS,
    FAST,
    nobody_private,
    private_plan,
    record_plan,
)
from tests.support.strategies import strategy_of

EVERYONE = FullParticipation(CLIENTS)

PLANS = {
    "no privacy": nobody_private,
    "clients noise": lambda: private_plan(sampling=EVERYONE),
    "server noises": lambda: private_plan(sampling=EVERYONE, noise_placement="server"),
    "secure sums": lambda: private_plan(
        sampling=EVERYONE, noise_placement=SecureSum(colluding=0.0, dropouts=0.3)
    ),
    "noised models": record_plan,
    "output perturbation": lambda: PerturbationPlan(
        sampling=EVERYONE,
        perturbation=OutputPerturbation(clipping_norm=2.0, noise_stddev=0.1),
        delta=1e-3,
    ),
}
METHODS = {
    "DP-FedAvg": lambda plan, **o: strategy_of(DPFedAvg, plan=plan, local=FAST, **o),
    "DP-FedAvg-FT": lambda plan, **o: strategy_of(
        DPFedAvg, plan=plan, local=FAST, fine_tuning=FAST, **o
    ),
    "DP-FedSAM": lambda plan, **o: strategy_of(DPFedSAM, plan=plan, **o),
    "DP-FedSAM-FT": lambda plan, **o: strategy_of(DPFedSAM, plan=plan, fine_tuning=FAST, **o),
    "DP²-FedSAM": lambda plan, **o: strategy_of(
        DP2FedSAM, plan=plan, head=FAST, extractor=FAST, **o
    ),
    "Centaur": lambda plan, **o: strategy_of(Centaur, plan=plan, head=FAST, extractor=FAST, **o),
    "FedPer": lambda plan, **o: strategy_of(FedPer, plan=plan, local=FAST, **o),
    "FedRep": lambda plan, **o: strategy_of(FedRep, plan=plan, head=FAST, extractor=FAST, **o),
    "APFL": lambda plan, **o: strategy_of(APFL, plan=plan, local=FAST, **o),
    "DP-Ditto": lambda plan, **o: strategy_of(
        DPDitto, plan=plan, local=FAST, personal_training=FAST, **o
    ),
    "FedALA": lambda plan, **o: strategy_of(FedALA, plan=plan, local=FAST, **o),
    "FedAMP": lambda plan, **o: strategy_of(FedAMP, plan=plan, local=FAST, **o),
    "APPLE": lambda plan, **o: strategy_of(Apple, plan=plan, local=FAST, **o),
    "FedDyn": lambda plan, **o: strategy_of(FedDyn, plan=plan, local=FAST, **o),
    "pFedMe": lambda plan, **o: strategy_of(PFedMe, plan=plan, local=FAST, **o),
    "SCAFFOLD": lambda plan, **o: strategy_of(Scaffold, plan=plan, local=FAST, **o),
    "FedYogi": lambda plan, **o: strategy_of(Hosted, FedYogi(), plan=plan, local=FAST, **o),
    "Upcycled": lambda plan, **o: Upcycled(strategy_of(DPFedAvg, plan=plan, local=FAST, **o)),
}
OPTIONS = {"seed": 1, "evaluate_every": 0}


class Counting(InProcessGrid):
    """A grid that counts messages of training."""

    trainings = 0

    def _answer_in_process(self, messages):
        self.trainings += sum(
            message.metadata.message_type.startswith("train") and "arrays" in message.content
            for message in messages
        )
        return super()._answer_in_process(messages)


def run(strategy, problem, nodes, arrays=None):
    """Run two rounds; return the initial and the final model, and the grid."""
    method = getattr(strategy, "base", strategy).method
    grid = Counting(method.client_app(problem, allow_seeded_noise=True), nodes)
    initial = problem.initial_params(0)
    result = strategy.start(grid, ArrayRecord(arrays or initial), num_rounds=2)
    return initial, result.arrays.to_torch_state_dict(), grid
