"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from dataclasses import dataclass
from typing import Literal

from flower_ext.runs.settings import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
    Positive,
    setting,
)
from flower_ext.runs.shared_settings import CohortSettings, PrivacySettings, TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Settings(PrivacySettings, CohortSettings, TrainingSettings):
    """Seven methods, plain or upcycled, without or with perturbed local models."""

    method: Literal["fedavg", "fedavgm", "fedprox", "fedyogi", "scaffold", "feddyn", "pfedme"] = (
        setting("how local models become the next shared model")
    )
    upcycled: bool = setting("even rounds reuse models: no client trains, no privacy is spent")
    schedule: Literal["constant", "decaying", "half-lambda", "proximal-ratio"] = setting(
        "coefficient of the m-th even round: c, c/sqrt(m), l/2 or mu/(mu+l), where mu is "
        "proximal-weight"
    )
    coefficient: NotNegative = setting("the number c or l that schedule names")
    rounds: Count = setting("number of rounds; with upcycled, only every second trains")

    dataset: Literal[
        "synthetic-iid",
        "synthetic-0-0",
        "synthetic-0.5-0.5",
        "synthetic-1-1",
        "letters",
    ] = setting("the synthetic ones are drawn, or read from the authors' files")
    generated: bool = setting("draw synthetic devices even where the authors' file is found")
    classes: CountOrZero = setting("classes of synthetic devices; 0: the data set's")
    unit_features: bool = setting("scale every record to norm at most 1")
    model: str = setting("empty: the data set's default; binary-logistic: for two classes")
    clients: Count = setting("devices: clients-per-node times the number of SuperNodes")

    sampling: Literal["poisson", "fixed-size", "everyone"] = setting(
        "how cohorts are drawn", default="fixed-size"
    )
    sampling_rate: Fraction = setting("share of the devices in a cohort")
    straggler_ratio: NotNegative = setting(
        "share of a cohort that completes only some local epochs"
    )
    exact_stragglers: bool = setting(
        "the same number of stragglers in every cohort, as in the paper; only without perturbation"
    )

    # Privacy: the unit is one record, against a server that sees every upload.
    perturbation: Literal["none", "output", "objective"] = setting("perturbation of local models")
    delta: FractionBelowOne = setting("delta at which epsilon is reported")
    clipping_norm: Positive = setting("output: tau, clipping norm of the whole local model")
    noise_stddev: NotNegative = setting("output: sigma, stddev of the noise")
    noise_rate: NotNegative = setting("objective: alpha")

    solver: Literal["sgd", "newton"] = setting(
        "steps, or the exact minimiser of a small convex loss, whose sensitivity is provable"
    )
    local_epochs: Count = setting("passes over the device's records")
    learning_rate: Positive = setting("learning rate of the steps")
    momentum: FractionBelowOne = setting("momentum within a local training; pfedme has none")
    proximal_weight: NotNegative = setting("mu; for fedprox, 0 stands for 0.1")

    # Single methods
    server_learning_rate: NotNegative = setting("server's learning rate; 0: the method's default")
    server_momentum: NotNegative = setting("fedavgm: momentum of the server")
    adaptivity: NotNegative = setting("fedyogi: tau")
    regularization: NotNegative = setting("feddyn: alpha")
    attraction: NotNegative = setting("pfedme: lambda")
    personal_steps: Count = setting("pfedme: K")
    personal_learning_rate: Positive = setting("pfedme: learning rate of the personal model")
