"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from dataclasses import dataclass
from typing import Annotated, Literal

from flower_ext.runs.settings import CountOrZero, NotNegative, Positive, Rule, setting
from flower_ext.runs.shared_settings import (
    CohortSettings,
    PartitionSettings,
    ReleaseSettings,
    ServerSettings,
    TrainingSettings,
)


@dataclass(frozen=True, kw_only=True)
class Settings(
    ReleaseSettings, CohortSettings, PartitionSettings, TrainingSettings, ServerSettings
):
    """Client-level privacy on one data set, by methods of several papers and one control method."""

    method: Literal[
        "dp2-fedsam",
        "centaur",
        "dp-fedavg",
        "dp-fedavg-ft",
        "dp-fedsam",
        "dp-fedsam-ft",
        "fedper",
        "fedrep",
        "fedbn",
        "apfl",
        "fedavg",
        "p-fedsam",
        "own-head",
    ] = setting(
        "the last three are without privacy; own-head is a control, which keeps the initial "
        "extractor and trains heads only"
    )
    dataset: Literal[
        "digits", "mnist", "fashion-mnist", "cifar10", "femnist", "femnist-writers", "letters"
    ] = setting("digits come with the package; femnist-writers has one writer a client")
    partition: Literal["pathological", "dirichlet", "iid", "by-writer"] = setting(
        "how examples are dealt out to clients; by-writer: for femnist-writers alone"
    )
    model: str = setting("empty: the data set's default; for fedbn, its default with -bn")
    head_epochs: CountOrZero = setting("epochs of a personal head")
    head_learning_rate: Positive = setting("learning rate of a personal head")
    sam_radius: NotNegative = setting("q: radius of sharpness-aware minimisation")
    adapt_before_evaluation: bool = setting(
        "clients train their head on the current extractor before they evaluate"
    )
    apfl_weight: Annotated[float, Rule("a number in [0, 1]", lambda value: 0 <= value <= 1)] = (
        setting("alpha: weight of the personal model in apfl's mixture; 0: the shared model alone")
    )
