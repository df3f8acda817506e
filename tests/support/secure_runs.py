"""Small runs whose uploads are summed securely."""

from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.privacy import FullParticipation, ReleasePlan, SecureSum
from flower_ext.training import LocalTraining
from tests.support import strategies

CLIENTS = 8
FAST = LocalTraining(epochs=1, batch_size=10)
SEED = 3


def plan(**changes):
    facts = {
        "sampling": FullParticipation(CLIENTS),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 3,
        "delta": 0.01,
        "noise_placement": SecureSum(colluding=0.0, dropouts=0.3),
    }
    return ReleasePlan(**{**facts, **changes})


def strategy_of(method=DPFedAvg, **changes):
    more = {"personal": ("head",)} if method is DP2FedSAM else {"local": FAST}
    options = {"seed": SEED, "seeded_noise": True, "evaluate_every": 0, "timeout": 5.0}
    return strategies.strategy_of(
        method, plan=changes.pop("plan", plan()), **{**more, **options, **changes}
    )
