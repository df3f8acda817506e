"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from __future__ import annotations

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
        setting("how local models become the next one")
    )
    upcycled: bool = setting("even rounds reuse models: nobody trains, no privacy is spent")
    schedule: Literal["constant", "decaying", "half-lambda", "proximal-ratio"] = setting(
        "c, c/sqrt(m), l/2 or mu/(mu+l), with mu = proximal-weight"
    )
    coefficient: NotNegative = setting("c, or l")
    rounds: Count = setting("visible ones: with upcycled, every second trains")

    dataset: Literal[
        "synthetic-iid",
        "synthetic-0-0",
        "synthetic-0.5-0.5",
        "synthetic-1-1",
        "letters",
    ] = setting("the synthetic ones are drawn, or read from the authors' files")
    generated: bool = setting("draw synthetic devices even where the authors' file is found")
    classes: CountOrZero = setting("of synthetic devices; 0: the data set's")
    unit_features: bool = setting("scale every record to norm at most 1")
    model: str = setting("for two classes; empty: the data set's default")
    clients: Count = setting("devices; clients-per-node times the number of SuperNodes")

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
    perturbation: Literal["none", "output", "objective"] = setting("of the local models")
    delta: FractionBelowOne = setting("at which epsilon is reported")
    clipping_norm: Positive = setting("output: tau, of the whole local model")
    noise_stddev: NotNegative = setting("output: sigma")
    noise_rate: NotNegative = setting("objective: alpha")

    solver: Literal["sgd", "newton"] = setting(
        "steps, or the exact minimiser of a small convex loss, whose sensitivity is provable"
    )
    local_epochs: Count = setting("passes over the device's records")
    learning_rate: Positive = setting("of the steps")
    momentum: FractionBelowOne = setting("within a local training; not for pfedme, which has none")
    proximal_weight: NotNegative = setting("mu; FedProx needs it above 0 (0 there: 0.1)")

    # Single methods
    server_learning_rate: NotNegative = setting("0: the method's default")
    server_momentum: NotNegative = setting("fedavgm")
    adaptivity: NotNegative = setting("fedyogi: tau")
    regularization: NotNegative = setting("feddyn: alpha")
    attraction: NotNegative = setting("pfedme: lambda")
    personal_steps: Count = setting("pfedme: K")
    personal_learning_rate: Positive = setting("pfedme")
