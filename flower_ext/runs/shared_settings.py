"""Settings that apps share; `federation.configured` builds a run's objects from them."""

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

    rounds: Count = setting("number of rounds of training")
    seed: CountOrZero = setting(
        "seed of all draws. 0: the operating system draws cohorts and noise; initial models and "
        "batches have a fixed seed. If noise is secure, the operating system always draws cohorts",
        default=0,
    )
    seeded_noise: bool = setting("reproducible noise, for simulation only", default=False)
    evaluate_every: CountOrZero = setting(
        "rounds between evaluations; 0: never. Unless evaluation is secure, scores are not noised, "
        "and no guarantee covers them",
        default=1,
    )
    training_loss: bool = setting(
        "clients report losses of personal models on training records; no guarantee covers these",
        default=False,
    )
    diagnostics: bool = setting(
        "clients report norms of updates before clipping; no guarantee covers these", default=False
    )
    preset: str = setting(
        "name, title and changes of the preset, as --preset records them", default=""
    )
    data_folder: str = setting("folder of data sets; empty: that in FLOWER_EXT_DATA", default="")
    run_directory: str = setting(
        "folder of this run's files; empty: a new folder in FLOWER_EXT_RUNS, or ./runs", default=""
    )
    state_folder: str = setting(
        "simulation: folder of the clients' memory, which methods with memory need to resume "
        "(flower-ext run: by default in the run directory; SuperNodes: --node-config "
        "\"state-folder='/path'\")",
        default="",
    )
    resume: bool = setting("continue the run in run-directory, if there is one", default=False)
    connect_timeout: Positive = setting("seconds to wait for all SuperNodes", default=600.0)
    round_timeout: Positive = setting("seconds to wait for replies in a round", default=3600.0)


@dataclass(frozen=True, kw_only=True)
class ClientSettings(Settings):
    """The clients of a run."""

    clients: Count = setting("number of clients: clients-per-node times the number of SuperNodes")
    clients_per_node: CountOrZero = setting(
        "clients that share a node, one message and one batch of trainings. 0: flower-ext run "
        "chooses, with at most one node per core; elsewhere 1",
        default=1,
    )


@dataclass(frozen=True, kw_only=True)
class CohortSettings(ClientSettings):
    """The clients of a run, and how each round samples a cohort of them."""

    sampling: Literal["poisson", "fixed-size", "everyone"] = setting("how cohorts are drawn")
    sampling_rate: Fraction = setting("fraction of the clients in a cohort, on average")


@dataclass(frozen=True, kw_only=True)
class PartitionSettings(Settings):
    """The division of a data set among clients."""

    partition: Literal["pathological", "dirichlet", "iid"] = setting(
        "how classes are divided among clients"
    )
    classes_per_client: Count = setting("pathological: number of classes of a client")
    dirichlet_alpha: Positive = setting("dirichlet: alpha; less makes clients differ more")
    dirichlet_min_size: Count = setting("dirichlet: fewest examples of a client")


@dataclass(frozen=True, kw_only=True)
class PrivacySettings(RunSettings):
    """The guarantee of a run, and the budgets at which it ends."""

    epsilon: Positive | None = setting("epsilon after all rounds", default=None)
    delta: FractionBelowOne = setting("delta at which epsilon holds")
    calibration: Basis = setting(
        "bound on epsilon by which the noise is chosen: provable, or published by the paper",
        default="provable",
    )
    clipping_norm: Positive = setting("C: clipping norm of a client's update")
    budget: NotNegative = setting("provable epsilon at which the run ends; 0: none", default=0.0)
    budget_ledger: AbsolutePath = setting(
        "absolute path of an account that all runs on these people share", default=""
    )
    population_epsilon: NotNegative = setting(
        "budget-ledger: epsilon that all runs on these people may spend; replaces budget",
        default=0.0,
    )
    population_delta: FractionBelowOne = setting(
        "budget-ledger: delta at which epsilon is summed over the runs", default=0.0
    )

    @property
    def target(self) -> float | None:
        """The ε from which the run's noise is computed; None if the settings give the noise."""
        return self.epsilon


@dataclass(frozen=True, kw_only=True)
class ReleaseSettings(PrivacySettings):
    """Clipping and noise of clients' updates, and secure sums of updates and scores."""

    delta: FractionBelowOne = setting("delta at which epsilon holds; 0: 1 / clients")
    noise_multiplier: NotNegative = setting(
        "sigma, for the noise of a sum; overrides epsilon. 0: the least noise that keeps epsilon",
        default=0.0,
    )
    clipping: Literal["fixed", "adaptive"] = setting(
        "adaptive: clipping-norm is that of round 1; later norms follow a quantile of the updates",
        default="fixed",
    )
    clipping_quantile: ProperFraction = setting(
        "adaptive: fraction of the updates that should be no longer than the norm", default=0.5
    )
    clipping_learning_rate: Positive = setting(
        "adaptive: learning rate of the logarithm of the norm", default=0.2
    )
    noise_placement: Literal["client", "server"] = setting(
        "who adds independent noise", default="client"
    )
    noise: Literal["independent", "correlated"] = setting(
        "correlated: the server's noise, part of which later rounds subtract again; clients take "
        "part in turn, and no cohort is secret",
        default="independent",
    )
    noise_buffers: Count = setting(
        "correlated: stored vectors of the model's size from which noise is taken back, at most 5",
        default=2,
    )
    noise_bands: CountOrZero = setting(
        "correlated: bands of the strategy matrix, in place of buffers; 0: buffers", default=0
    )
    rounds_apart: CountOrZero = setting(
        "correlated: rounds from one participation of a client to its next; 0: as many as the "
        "number of clients allows",
        default=0,
    )
    participations: CountOrZero = setting(
        "correlated: most rounds in which a client takes part; 0: as many as rounds-apart allows",
        default=0,
    )
    state_key_file: AbsolutePath = setting(
        "correlated: absolute path of 32 random bytes, with which the server encrypts its secret "
        "noise",
        default="",
    )
    aggregation: Literal["plain", "secure"] = setting(
        "plain: the server sees each upload; secure: it sees only sums, of cohorts of a fixed size",
        default="plain",
    )
    colluding_share: FractionBelowOne = setting(
        "secure: share of all clients that may collude with the server", default=0.1
    )
    dropout_share: FractionBelowOne = setting(
        "secure: share of a cohort that may be lost in a round; if more are lost, the round is "
        "discarded",
        default=0.1,
    )
    signed_sums: bool = setting(
        "secure: clients sign their keys, so that sums withstand a server that lies; every node "
        "config names sum-identity-key and sum-members",
        default=False,
    )
    evaluation: Literal["plain", "secure"] = setting(
        "plain: the server learns each client's scores; secure: it learns only noised means from a "
        "secure sum, which epsilon counts",
        default="plain",
    )
    evaluation_share: ProperFraction = setting(
        "secure: share of epsilon for all evaluations together", default=0.2
    )
    evaluation_noise_multiplier: NotNegative = setting(
        "secure: noise multiplier of a sum of scores; 0: the least that evaluation-share allows",
        default=0.0,
    )
    evaluation_loss_bound: NotNegative = setting(
        "secure: largest loss that counts; 0: losses stay with the clients", default=0.0
    )

    @property
    def target(self) -> float | None:
        """The ε from which the run's noise is computed; None if the settings give the noise."""
        return None if self.noise_multiplier else self.epsilon


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """Local training of every client."""

    batch_size: Count = setting("examples per step")
    local_epochs: Count = setting("local epochs of the whole model, or of the extractor")
    learning_rate: Positive = setting("learning rate of the whole model, or of the extractor")
    learning_rate_decay: Fraction = setting("factor of learning rates per round", default=1.0)
    momentum: FractionBelowOne = setting("momentum within a local training", default=0.0)
    optimizer: str = setting(
        "SGD, AdamW, or another optimizer of torch.optim that steps by a gradient", default="SGD"
    )
    weight_decay: NotNegative = setting(
        "weight decay of an optimizer other than SGD and Rprop; 0: none", default=0.0
    )
    weighting: Literal["clients", "examples"] = setting(
        "weights in the mean: clients (all equal), or examples (only without privacy)",
        default="clients",
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Settings):
    """The optimizer that applies the mean update, and the average of the models so far."""

    server_learning_rate: Positive = setting("factor of the mean update", default=1.0)
    server_optimizer: Literal["sgd", "adagrad", "adam", "yogi"] = setting(
        "how the server moves along the mean update", default="sgd"
    )
    server_momentum: FractionBelowOne = setting(
        "momentum of sgd; beta_1 of the other optimizers", default=0.0
    )
    server_tau: Positive = setting(
        "tau of adagrad, adam and yogi; choose at least the noise's deviation in the mean update",
        default=1e-3,
    )
    average_decay: FractionBelowOne = setting(
        "clients evaluate the average of all models so far, with weights that fall by this factor "
        "per round; 0: the newest model",
        default=0.0,
    )
    average_last: CountOrZero = setting(
        "clients evaluate the mean of this many last models; 0: the newest model", default=0
    )
