"""APPLE: each client learns how strongly to weight every other client's core model.

Source: Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning"
(IJCAI 2022), Algorithm 1, with all core models downloaded in every round.

====================  =====================================================
paper                 here
====================  =====================================================
w_i^(c), w_i^(p)      core model, personal model Σ_j p_ij w_j^(c): the client's memory
p_i                   directed relationship vector: the client's memory
p_0                   1/N for each client
η_1                   ``local.learning_rate``, for the client's core model
η_2                   ``relation_learning_rate``
μ                     ``penalty``
λ(r)                  (cos(πr/L) + 1)/2 up to round L = ``penalty_rounds``, then 0
====================  =====================================================

In each round the server sends a client the core models of all clients. For its own core model, the
client uses its memory, not the server's copy. Under a `RecordLevelPlan` the client uploads its core
model after clipping and with noise; p_i and the personal model never leave the client.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np
import torch
from torch import Tensor

from flower_ext.checks import Count, NotNegative, Positive
from flower_ext.federation import (
    Arrays,
    ClientMethod,
    ClientWork,
    Cohort,
    LocalResult,
    Method,
    Released,
    State,
    Steps,
    last_trained,
    require_usual_server,
)
from flower_ext.federation.method_state import groups_under
from flower_ext.training import (
    Job,
    LocalTraining,
    Params,
    clone,
    gradient,
    job_batches,
    local_problem,
    tagged,
)
from flower_ext.training.params import flat_rows

CORE, PERSONAL, RELATION = "core", "personal", "relation"


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the client's core model and its vector p_i by the gradient at the personal model."""
    start = last_trained(work, CORE)
    solve = partial(train_mixture, work)
    core, relation, personal = yield work.train("local", start, solve=solve, returns_params=False)
    memory = {RELATION: relation, **tagged(CORE, core), **tagged(PERSONAL, personal)}
    return LocalResult(model=core, memory=memory)


def train_mixture(work: ClientWork, job: Job) -> tuple[Params, Tensor, Params]:
    """Train the core model, which starts at ``job.params``, and the vector p_i.

    Return the core model, p_i, and the personal model that follows from them.
    """
    problem = local_problem(work.task, job.params, terms=job.terms)
    others = {int(other): core for other, core in groups_under(f"{CORE}.", work.state).items()}
    clients = range(len(others) + 1)
    # The client's core model came as the message's model, so the missing number is the client's.
    (index,) = set(clients) - set(others)
    models = [others.get(j, job.params) for j in clients]
    # Stack the core models: one product per name then mixes them, or gives the gradient for p.
    cores = {
        name: torch.stack([model[name].to(problem.device) for model in models])
        for name in problem.start
    }
    centre = 1 / len(clients)
    # Take the widest type of the models: some devices have no float64.
    types = [core.dtype for core in cores.values() if core.is_floating_point()]
    dtype = reduce(torch.promote_types, types, torch.float32)
    equal = torch.full((len(clients),), centre, dtype=dtype)
    p = (work.memory or {}).get(RELATION, equal).to(problem.device)
    last, rounds = work.round - 1, work.settings["penalty_rounds"]
    fading = (math.cos(math.pi * last / rounds) + 1) / 2 if last < rounds else 0.0
    penalty, step = fading * work.settings["penalty"], work.settings["relation_learning_rate"]

    def personal() -> Params:
        return {
            name: torch.tensordot(p.to(core.dtype), core, dims=1) for name, core in cores.items()
        }

    for x, y in job_batches(work.task, job):
        slope = gradient(problem.loss_at, personal(), x, y)
        # By the chain rule, the slope along p_j is the product of w_j and the gradient.
        along = sum(flat_rows(cores[name]) @ slope[name].flatten() for name in cores)
        for name, core in cores.items():
            rate = job.training.learning_rate * float(p[index])
            core[index].sub_(slope[name], alpha=rate)
        p = p - step * (along + penalty * (p - centre))
    core_model = problem.whole({name: core[index] for name, core in cores.items()}, like=job.params)
    return clone(core_model), p.cpu(), problem.whole(personal(), like=job.params)


@dataclass(frozen=True, kw_only=True)
class Apple(Method):
    """Core models that all clients share and that each client mixes into a personal model.

    Each client learns its own weights for the core models. The reported shared model is the
    plain mean of the core models.

    Any plan but a `ReleasePlan` fits, because the server needs each client's core model.

    Parameters
    ----------
    relation_learning_rate : float
        η_2: learning rate of p_i.
    penalty : float
        μ >= 0: initial strength of the pull of p_i towards equal weights.
    penalty_rounds : int
        L: number of rounds over which the penalty fades to 0.
    local : LocalTraining
        Training of the core model, by plain SGD.
    **options
        Fields of `Method`, except ``server`` and ``average``.
    """

    client = ClientMethod(
        name="apple", local_update=local_update, local_model=partial(last_trained, tag=PERSONAL)
    )
    one_model = False
    weighs_updates = True
    needs_each_update = True

    relation_learning_rate: Positive = 0.01
    penalty: NotNegative = 0.1
    penalty_rounds: Count = 20
    local: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_usual_server(self, "APPLE's server stores each core model as it arrives")
        self.local.require_plain_sgd("local", "APPLE trains core models by plain SGD")

    def init(self, model: Arrays, population: int) -> State:
        """Return the core models, each of which begins as the initial model."""
        return State(server={str(client): model for client in range(population)})

    def begin_round(self, cohort: Cohort, model: Arrays, state: State) -> Cohort:
        """Send each client all core models.

        A client receives its own core model as its model. Every other core model is in a group
        ``core.NUMBER``, with the number of the client that trains it.
        """
        cores = {int(client): core for client, core in state.server.items()}
        requests = {
            partition: {f"{CORE}.{n}": core for n, core in cores.items() if n != partition}
            for partition in cohort.partitions
        }
        return replace(cohort, models=cores, requests=requests)

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Store the new core models; return their mean, which is reported as the shared model."""
        cores = dict(state.server)
        for client, update in released.updates.items():
            sent = cores[str(client)]
            cores[str(client)] = {
                name: (sent[name] + update.arrays[name]).astype(array.dtype)
                for name, array in model.items()
            }
        return _mean(cores.values()), State(server=cores)

    def forget(self, partitions: Collection[int], state: State, population: int) -> State:
        """Replace the core models of clients that withdrew by the mean of all others."""
        # Other clients keep a weight for every core model, so no core model may be missing.
        left = {c: core for c, core in state.server.items() if int(c) not in partitions}
        mean = _mean(left.values()) if left else {}
        return State(server={client: left.get(client, mean) for client in state.server})


def _mean(cores: Collection[Arrays]) -> Arrays:
    return {name: np.mean([core[name] for core in cores], axis=0) for name in next(iter(cores))}
