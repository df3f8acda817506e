"""Settings that apps share; `flower_ext.federation.configured` builds the parts of a run from them.

==================== ==============================================================
class                settings
==================== ==============================================================
`RunSettings`        length, randomness, evaluation, paths, waiting times
`ClientSettings`     the clients and their places on nodes
`CohortSettings`     the clients, and how each round samples a cohort of them
`PartitionSettings`  the division of a data set among clients
`PrivacySettings`    `RunSettings`, and the guarantee and the budgets of a run
`ReleaseSettings`    `PrivacySettings`, and clipping, noise and secure sums
`TrainingSettings`   local training
`ServerSettings`     the server's step along the mean update
==================== ==============================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flower_ext.privacy.guarantee import Basis
from flower_ext.runs.settings import (
    AbsolutePath,
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
    Positive,
    ProperFraction,
    Settings,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """Length, randomness, evaluation, paths and waiting times of a run."""

    rounds: Count = setting("of training")
    seed: CountOrZero = setting(
        "0: draws and noise come from the operating system's randomness, as cohorts do in any case "
        "where noise is secure; models and batches are then one fixed choice",
        default=0,
    )
    seeded_noise: bool = setting("reproducible noise: simulation only", default=False)
    evaluate_every: CountOrZero = setting(
        "rounds; 0: never. Scores are not noised and covered by no guarantee, unless evaluation is "
        "secure",
        default=1,
    )
    training_loss: bool = setting(
        "losses of personal models on training records; covered by no guarantee", default=False
    )
    diagnostics: bool = setting(
        "norms of updates before clipping; covered by no guarantee", default=False
    )
    preset: str = setting(
        "name, title and changes of the preset, as --preset records them", default=""
    )
    data_folder: str = setting("empty: the environment variable FLOWER_EXT_DATA", default="")
    run_directory: str = setting("empty: a new folder in FLOWER_EXT_RUNS, or ./runs", default="")
    state_folder: str = setting(
        "simulation: where clients keep their memory, to be resumed with (flower-ext run: by "
        "default a folder in the run directory; SuperNodes: --node-config "
        "\"state-folder='/path'\")",
        default="",
    )
    resume: bool = setting("continue the run in run-directory, if there is one", default=False)
    connect_timeout: Positive = setting("seconds to wait for all SuperNodes", default=600.0)
    round_timeout: Positive = setting("seconds to wait for their part of a round", default=3600.0)


@dataclass(frozen=True, kw_only=True)
class ClientSettings(Settings):
    """The clients of a run."""

    clients: Count = setting("clients-per-node times the number of SuperNodes")
    clients_per_node: CountOrZero = setting(
        "on Ray: their trainings are one batch, their messages one. 0: flower-ext run fills a node "
        "a core; elsewhere 1",
        default=1,
    )


@dataclass(frozen=True, kw_only=True)
class CohortSettings(ClientSettings):
    """The clients of a run, and how each round samples a cohort of them."""

    sampling: Literal["poisson", "fixed-size", "everyone"] = setting("how cohorts are drawn")
    sampling_rate: Fraction = setting("share of the clients in a cohort, on average")


@dataclass(frozen=True, kw_only=True)
class PartitionSettings(Settings):
    """The division of a data set among clients."""

    partition: Literal["pathological", "dirichlet", "iid"] = setting("who holds which classes")
    classes_per_client: Count = setting("pathological: how many a client has")
    dirichlet_alpha: Positive = setting("dirichlet: alpha")
    dirichlet_min_size: Count = setting("dirichlet: fewest examples of a client")


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(RunSettings):
    """The guarantee of a run, and the budgets at which it ends."""

    epsilon: Positive | None = setting("after all rounds", default=None)
    delta: FractionBelowOne = setting("at which epsilon holds")
    calibration: Basis = setting("whose bound on epsilon gives the noise", default="provable")
    clipping_norm: Positive = setting("C, of a client's update")
    budget: NotNegative = setting("provable epsilon at which the run ends; 0: none", default=0.0)
    budget_ledger: AbsolutePath = setting(
        "absolute path of an account that all runs on these people share", default=""
    )
    population_epsilon: NotNegative = setting(
        "what these people may spend together, in place of the run's own budget", default=0.0
    )
    population_delta: FractionBelowOne = setting(
        "at which all that they spend is added up", default=0.0
    )

    @property
    def target(self) -> float | None:
        """The ε for which the run's noise is calibrated; None if the settings fix the noise."""
        return self.epsilon


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings(PrivacySettings):
    """Clipping and noise of clients' updates, and secure sums of updates and scores."""

    delta: FractionBelowOne = setting("at which epsilon holds; 0: 1 / clients")
    noise_multiplier: NotNegative = setting(
        "sigma, of the sum; 0: as epsilon asks for, which it otherwise overrides", default=0.0
    )
    clipping: Literal["fixed", "adaptive"] = setting(
        "adaptive: clipping-norm is that of the first round, and follows a quantile of the norms",
        default="fixed",
    )
    clipping_quantile: ProperFraction = setting(
        "adaptive: fraction of the updates that should not be longer", default=0.5
    )
    clipping_learning_rate: Positive = setting(
        "adaptive: of the logarithm of the norm", default=0.2
    )
    noise_placement: Literal["client", "server"] = setting("who adds the noise", default="client")
    aggregation: Literal["plain", "secure"] = setting(
        "whether the server sees uploads, or sums alone, of cohorts of a fixed size",
        default="plain",
    )
    colluding_share: FractionBelowOne = setting(
        "secure: of all clients, those that may collude with the server", default=0.1
    )
    dropout_share: FractionBelowOne = setting(
        "secure: of a cohort, clients that may be lost in a round; of more, the round is discarded",
        default=0.1,
    )
    evaluation: Literal["plain", "secure"] = setting(
        "whether the server learns each client's scores, or only noised means from a secure sum, "
        "which epsilon counts",
        default="plain",
    )
    evaluation_share: ProperFraction = setting(
        "secure: share of epsilon for all evaluations together", default=0.2
    )
    evaluation_noise_multiplier: NotNegative = setting(
        "secure: of a sum of scores; 0: as evaluation-share asks for", default=0.0
    )
    evaluation_loss_bound: NotNegative = setting(
        "secure: largest loss that counts; 0: losses stay with the clients", default=0.0
    )

    @property
    def target(self) -> float | None:
        """The ε for which the run's noise is calibrated; None if the settings fix the noise."""
        return None if self.noise_multiplier else self.epsilon


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """Local training of every client."""

    batch_size: Count = setting("examples a step")
    local_epochs: Count = setting("of the whole model, or of the extractor")
    learning_rate: Positive = setting("of the whole model, or of the extractor")
    learning_rate_decay: Fraction = setting("factor a round", default=1.0)
    momentum: FractionBelowOne = setting("within a local training", default=0.0)
    optimizer: str = setting(
        "or AdamW, or another of torch.optim that steps by a gradient", default="SGD"
    )
    weight_decay: NotNegative = setting("of another optimizer than SGD", default=0.0)
    weighting: Literal["clients", "examples"] = setting(
        "who counts how much; examples: only without privacy", default="clients"
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """The server's step along the mean update, and the average of its models."""

    server_learning_rate: Positive = setting("factor of the mean update", default=1.0)
    server_optimizer: Literal["sgd", "adagrad", "adam", "yogi"] = setting(
        "how the server moves along the mean update", default="sgd"
    )
    server_momentum: FractionBelowOne = setting("of sgd; of the others beta_1", default=0.0)
    server_tau: Positive = setting(
        "of adagrad, adam and yogi: at least the noise of a coordinate of the mean", default=1e-3
    )
    average_decay: FractionBelowOne = setting(
        "clients evaluate the average of all models so far, whose weights fall by this factor a "
        "round; 0: the newest model",
        default=0.0,
    )
    average_last: CountOrZero = setting(
        "clients evaluate the mean of so many last models; 0: the newest model", default=0
    )
