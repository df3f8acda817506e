"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from dataclasses import dataclass
from typing import Literal

from flower_ext.privacy.guarantee import Basis
from flower_ext.runs.settings import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
    Positive,
    setting,
)
from flower_ext.runs.shared_settings import (
    ClientSettings,
    PartitionSettings,
    PrivacySettings,
    TrainingSettings,
)


@dataclass(frozen=True, kw_only=True)
class Settings(PrivacySettings, ClientSettings, PartitionSettings, TrainingSettings):
    """Five methods for personal models with record-level privacy, and the same five without it."""

    method: Literal[
        "dp-ditto",
        "dp-pfedme",
        "dp-fedamp",
        "dp-apple",
        "dp-fedala",
        "ditto",
        "pfedme",
        "fedamp",
        "apple",
        "fedala",
    ] = setting("the last five are without privacy")
    rounds: Count = setting("T: number of rounds; with a planner, the most that it may choose")
    dataset: Literal["digits", "mnist", "fashion-mnist", "cifar10", "femnist", "letters"] = setting(
        "digits come with the package"
    )
    model: str = setting("empty: the data set's default")
    examples_per_client: Count = setting(
        "training examples of a client, equal for all clients, because the plan counts on that"
    )

    # Privacy: the unit is one record, against a server that sees every upload.
    epsilon: Positive = setting("epsilon after all rounds")
    delta: FractionBelowOne = setting(
        "delta at which epsilon holds: below 1 / number of all clients' records"
    )
    calibration: Basis = setting("bound on epsilon by which the noise is chosen (published: Eqn 8)")
    noise: Literal["steps", "upload"] = setting(
        "steps: noise in each local step (dp-ditto only); upload: noise on the clipped model, as "
        'in the paper, with calibration = "published", whose provable epsilon is above 100,000'
    )
    clipping_norm: Positive = setting("C: clipping norm of the local model")
    gradient_clipping_norm: Positive = setting(
        'G: clipping norm of a record\'s gradient, with noise = "steps"'
    )

    # Local training
    batch_size: CountOrZero = setting("examples per step; 0: all")
    local_epochs: Count = setting("local epochs of the uploaded model")
    learning_rate: Positive = setting("learning rate of the uploaded model")
    personal_epochs: CountOrZero = setting("ditto: epochs of the personal model")
    personal_learning_rate: Positive = setting("ditto, pfedme: rate of the personal model")

    # Single methods
    global_weight: NotNegative = setting("ditto: lambda in [0, 2]; 0: only local, 2: only global")
    attraction: NotNegative = setting("pfedme: lambda")
    personal_steps: Count = setting("pfedme: K")
    attention_width: Positive = setting("fedamp: sigma")
    cloud_attraction: NotNegative = setting("fedamp: lambda / alpha")
    relation_learning_rate: NotNegative = setting("apple: eta_2")
    penalty: NotNegative = setting("apple: mu")
    weight_learning_rate: NotNegative = setting("fedala: eta")
    sample_fraction: Fraction = setting("fedala: s")

    # Planner of the number of rounds
    planner: Literal["none", "bound", "pilot"] = setting(
        "dp-ditto: none takes rounds; bound and pilot need the plug-in flower-ext-planner; bound "
        "takes the T of Theorem 1 for the constants below; "
        "pilot takes it for constants that full-gradient descent on the clients' records finds and "
        "writes to pilot.toml. The pilot has no noise, and no guarantee covers it: for simulations "
        "and public stand-ins only"
    )
    pilot_rounds: Count = setting("pilot: number of steps")
    pilot_learning_rate: Positive = setting("pilot: learning rate")
    strong_convexity: NotNegative = setting("bound: mu")
    smoothness: NotNegative = setting("bound: L")
    initial_gap: NotNegative = setting("bound: Psi_1")
    initial_distance: NotNegative = setting("bound: Psi_2")
    gradient_bound: NotNegative = setting("bound, published only: G_0; 0: unknown")
    model_spread: NotNegative = setting("bound, published only: M; 0: unknown")
