"""Small runs whose uploads are summed securely."""

from functools import partial

from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.privacy import SecureSum
from flower_ext.training import LocalTraining
from tests.support import strategies
from tests.support.plans import release_plan

CLIENTS = 8
FAST = LocalTraining(epochs=1, batch_size=10)
SEED = 3
plan = partial(
    release_plan, CLIENTS, delta=0.01, noise_placement=SecureSum(colluding=0.0, dropouts=0.3)
)


def strategy_of(method=DPFedAvg, **changes):
    more = {"personal": ("head",)} if method is DP2FedSAM else {"local": FAST}
    options = {"seed": SEED, "seeded_noise": True, "evaluate_every": 0, "timeout": 5.0}
    return strategies.strategy_of(
        method, plan=changes.pop("plan", plan()), **{**more, **options, **changes}
    )
