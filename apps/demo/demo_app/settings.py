"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from dataclasses import dataclass
from typing import Literal

from flower_ext.runs.settings import Count, setting
from flower_ext.runs.shared_settings import CohortSettings, ReleaseSettings, TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Settings(ReleaseSettings, CohortSettings, TrainingSettings):
    """Many clients with a few digits each: alone, together with privacy, together without."""

    method: Literal["alone", "dp-fedavg", "fedavg"] = setting(
        "alone: each client trains on its own digits only; dp-fedavg: together with privacy; "
        "fedavg: together without privacy"
    )
    dataset: Literal["digits", "mnist"] = setting("digits come with the package")
    digits_per_client: Count = setting("number of a client's training digits")
    epochs_alone: Count = setting("alone: epochs of a client's training")
