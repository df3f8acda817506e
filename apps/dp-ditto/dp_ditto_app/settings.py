"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from __future__ import annotations

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
    """Record-level privacy with personal models, by five methods, and these without privacy."""

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
    ] = setting("the last five without privacy")
    rounds: Count = setting("T; with planner, the most that it may choose")
    dataset: Literal["digits", "mnist", "fashion-mnist", "cifar10", "femnist", "letters"] = setting(
        "digits come with the package"
    )
    model: str = setting("empty: the data set's default")
    examples_per_client: Count = setting(
        "for training, the same for all, because the plan counts on it"
    )

    # Privacy: the unit is one record, against a server that sees every upload.
    epsilon: Positive = setting("after all rounds")
    delta: FractionBelowOne = setting("at which epsilon holds: below one over all clients' records")
    calibration: Basis = setting("whose bound on epsilon gives the noise (published: Eqn 8)")
    noise: Literal["steps", "upload"] = setting(
        "in each local step (dp-ditto), or on the clipped model. The paper and all other methods: "
        'upload, with calibration = "published", whose provable epsilon is above 100,000'
    )
    clipping_norm: Positive = setting("C, of the local model")
    gradient_clipping_norm: Positive = setting('G, of one record\'s gradient, with noise = "steps"')

    # Local training
    batch_size: CountOrZero = setting("examples a step; 0: all")
    local_epochs: Count = setting("of the model that is uploaded")
    learning_rate: Positive = setting("of the model that is uploaded")
    personal_epochs: CountOrZero = setting("ditto")
    personal_learning_rate: Positive = setting("ditto, pfedme")

    # Single methods
    global_weight: NotNegative = setting("ditto: lambda in [0, 2]; 0: only local, 2: only global")
    attraction: NotNegative = setting("pfedme: lambda")
    personal_steps: Count = setting("pfedme: K")
    attention_width: Positive = setting("fedamp: sigma")
    cloud_attraction: NotNegative = setting("fedamp: lambda / alpha")
    relation_learning_rate: NotNegative = setting("apple: eta_2")
    penalty: NotNegative = setting("apple: mu")
    weight_learning_rate: NotNegative = setting("fedala: eta")
    sample_share: Fraction = setting("fedala: s")

    # Planner of the number of rounds
    planner: Literal["none", "bound", "pilot"] = setting(
        "dp-ditto: rounds, or the T of Theorem 1 for the constants below, or for those that "
        "full-gradient descent on the clients' records shows, without noise and covered by no "
        "guarantee: for simulations and public stand-ins; they are left in pilot.toml"
    )
    pilot_rounds: Count = setting("steps of the pilot")
    pilot_learning_rate: Positive = setting("of the pilot")
    strong_convexity: NotNegative = setting("bound: mu")
    smoothness: NotNegative = setting("bound: L")
    initial_gap: NotNegative = setting("bound: Psi_1")
    initial_distance: NotNegative = setting("bound: Psi_2")
    gradient_bound: NotNegative = setting("bound, published only: G_0; 0: unknown")
    model_spread: NotNegative = setting("bound, published only: M; 0: unknown")
