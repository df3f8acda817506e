"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from dataclasses import dataclass
from typing import Literal

from flower_ext.runs.settings import AbsolutePath, Count, Positive, setting
from flower_ext.runs.shared_settings import (
    CohortSettings,
    ReleaseSettings,
    ServerSettings,
    TrainingSettings,
)


@dataclass(frozen=True, kw_only=True)
class Settings(ReleaseSettings, CohortSettings, TrainingSettings, ServerSettings):
    """Private fine-tuning of a causal language model."""

    method: Literal["dp-fedavg", "uldp-avg-w", "fedavg", "alone"] = setting(
        "dp-fedavg: privacy for each client; uldp-avg-w: for each author, whose texts lie with "
        "several clients; fedavg: without privacy; alone: each client trains for itself"
    )

    dataset: Literal["python", "folder"] = setting(
        "python: functions of Python's standard library; folder: texts in data-folder"
    )
    texts_per_client: Count = setting(
        "python: number of functions of a client, or of an author at one client; a quarter are "
        "for tests"
    )
    num_users: Count = setting("uldp-avg-w: number of authors")
    max_tokens: Count = setting("tokens in a window of running text; the most tokens of a record")

    base: str = setting(
        "folder of a causal model and its tokenizer, or a name on the hub; empty: a tiny model "
        "that the app trains on Python's documentation, once, in cache-folder"
    )
    cache_folder: AbsolutePath = setting(
        "absolute path of the tiny model's folder; empty: ~/.cache/flower-ext", default=""
    )
    lora_rank: Count = setting("r: rank of LoRA's matrices")
    lora_only_b: bool = setting("only B trains; A stays as drawn, equal on all nodes (FFA-LoRA)")
    lora_targets: str = setting(
        "layers with adapters, separated by commas; all-linear: all linear layers but the head; "
        "empty: all-linear, and in the tiny model also the head"
    )

    epochs_alone: Count = setting("alone: epochs of a client's training")
    clipping_norm: Positive = setting(
        "C: clipping norm of an update; with clipping=adaptive, of the first round"
    )
