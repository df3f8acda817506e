"""FedAMP: the server mixes a cloud model for each client, mostly from similar clients' models.

Source: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on
Non-IID Data" (AAAI 2021), Algorithm 1 with the attention A(x) = 1 − e^{−x/σ}.

====================  =====================================================
paper                 here
====================  =====================================================
w_i, u_i              the client's memory, the model that the client receives
ξ_ij                  `attention`: α A'(‖w_i − w_j‖²) for j ≠ i, and 1 − Σ_j ξ_ij for i itself
σ                     ``attention_width``
α_k                   σ/N for N clients, so that no ξ_ii is negative
λ/α_k                 ``attraction``
====================  =====================================================

Client i descends F_i(w) + (λ/2α_k) ‖w − u_i‖² from its own last w_i, where F_i is its loss. Under a
`RecordLevelPlan` the client uploads a clipped and noised version of w_i. The server compares and
mixes only these uploads; the exact w_i stays on the client.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from logging import getLogger

import numpy as np
from numpy.typing import NDArray

from flower_ext.checks import Positive
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
    personal_model,
    require_usual_server,
)
from flower_ext.federation.messages.records import flattened, shaped
from flower_ext.federation.method_state import groups_under
from flower_ext.training import LocalTraining, Proximal

log = getLogger("flwr")

UPLOADED, CLOUD, FADING = "uploaded.", "cloud.", "fading"
"""Groups in the state: each client's w_i, each client's u_i, and an empty group that shows that the
server has already warned."""
_LEAST_WEIGHT = 0.01
"""The server warns if other clients have less than this weight in every cloud model."""


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train the client's own model, with a proximal term towards the received cloud model."""
    start = work.memory or work.received
    pull = Proximal(weight=work.settings["attraction"], anchor=work.received)
    trained = yield work.train("local", start, terms=[pull])
    return LocalResult(model=trained, memory=trained)


def attention(models: NDArray[np.float64], *, width: float, population: int) -> NDArray[np.float64]:
    """Return the matrix of all ξ_ij, of shape (n, n) for n models; each of its rows sums to 1.

    Each row of ``models`` is one flattened model. ``width`` is σ, and ``population`` is N >= n.
    """
    from scipy.spatial.distance import pdist, squareform  # clients do not need SciPy

    weights = squareform(np.exp(-pdist(models, "sqeuclidean") / width) / population)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return np.asarray(weights)


@dataclass(frozen=True, kw_only=True)
class FedAMP(Method):
    """Attentive message passing between clients with similar models.

    Attention sets the weights in the cloud models. The reported shared model is the plain mean of
    the clients' uploads. Attention fades as models move apart. If other clients' models make up
    less than 1 % of every cloud model, the server warns once.

    Any plan but a `ReleasePlan` fits, because the server needs each client's model.

    Parameters
    ----------
    attention_width : float
        σ: scale of the squared distance over which attention between two models decays.
    attraction : float
        λ/α: strength of the pull of a client's model towards its cloud model.
    local : LocalTraining
        Training of a client's model, pulled towards its cloud model.
    **options
        Fields of `Method`, except ``server`` and ``average``.
    """

    client = ClientMethod(name="fedamp", local_update=local_update, local_model=personal_model)
    one_model = False
    weighs_updates = True
    needs_each_update = True

    attention_width: Positive = 1.0
    attraction: Positive = 1.0
    local: LocalTraining = LocalTraining()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_usual_server(self, "FedAMP's server stores each model as it arrives")

    def begin_round(self, cohort: Cohort, model: Arrays, state: State) -> Cohort:
        """Send each client its cloud model u_i; a client without one gets the shared model."""
        clouds = groups_under(CLOUD, state.server)
        return replace(cohort, models={int(client): cloud for client, cloud in clouds.items()})

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Store the models w_i, mix the next cloud models, and return the mean of all models."""
        uploaded = groups_under(UPLOADED, state.server)
        # A client whose reply was lost keeps the model that it uploaded last.
        for partition, update in released.updates.items():
            received = state.server.get(CLOUD + str(partition), model)
            uploaded[str(partition)] = {
                name: received[name] + update.arrays[name] for name in model
            }
        groups, flat, weights = self._mixed(uploaded, released.population)
        if FADING in state.server or self._warns_of_fading(flat, weights):
            groups[FADING] = {}
        return _shaped(flat.mean(axis=0), model), State(server=groups)

    def forget(self, partitions: Collection[int], state: State, population: int) -> State:
        """Drop the models of clients that withdrew, and mix all cloud models without them."""
        uploaded = groups_under(UPLOADED, state.server)
        left = {c: model for c, model in uploaded.items() if int(c) not in partitions}
        if len(left) == len(uploaded):
            return state
        groups = self._mixed(left, population)[0] if left else {}
        return State(server={n: {} for n in state.server if n == FADING} | groups)

    def _mixed(
        self, uploaded: Mapping[str, Arrays], population: int
    ) -> tuple[dict[str, Arrays], NDArray[np.float64], NDArray[np.float64]]:
        """Return the groups of uploads and cloud models, the uploads as rows, and all ξ_ij."""
        clients = sorted(uploaded, key=int)
        # In float32, the distance of two similar models would be lost to rounding.
        flat = np.stack([flattened(uploaded[client]).astype(np.float64) for client in clients])
        weights = attention(flat, width=self.attention_width, population=population)
        groups = {UPLOADED + client: uploaded[client] for client in clients}
        for client, cloud in zip(clients, weights @ flat, strict=True):
            groups[CLOUD + client] = _shaped(cloud, uploaded[client])
        return groups, flat, weights

    def _warns_of_fading(self, models: NDArray[np.float64], weights: NDArray[np.float64]) -> bool:
        """Warn if every client's cloud model is almost its own model; return True if so."""
        most = 1.0 - float(np.diag(weights).min())
        if len(models) < 2 or most >= _LEAST_WEIGHT:
            return False
        from scipy.spatial.distance import pdist

        median = float(np.median(pdist(models, "sqeuclidean")))
        log.warning(
            "attention_width=%.4g: other clients make up at most %.1e of any client's cloud model, "
            "so clients train almost alone. Choose a larger attention_width, such as the median "
            "squared distance between two models, which is %.4g in this round",
            self.attention_width,
            most,
            median,
        )
        return True


def _shaped(vector: NDArray[np.float64], like: Arrays) -> Arrays:
    """Return a vector as a model of the shapes and types of ``like``."""
    return {name: part.astype(like[name].dtype) for name, part in shaped(vector, like).items()}
