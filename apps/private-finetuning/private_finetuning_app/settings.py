"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flower_ext.runs.settings import (
    AbsolutePath,
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
    Positive,
    setting,
)
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
    """Private fine-tuning of a pretrained model of pictures or of text."""

    method: Literal[
        "dp2-fedsam",
        "centaur",
        "dp-fedavg",
        "dp-fedavg-ft",
        "dp-fedsam",
        "dp-fedsam-ft",
        "uldp-avg-w",
        "fedavg",
        "p-fedsam",
        "own-head",
    ] = setting(
        "the last three without privacy; of uldp-avg-w clients are silos; own-head shares nothing "
        "that is learnt, as a control"
    )
    tune: Literal["head", "adapter", "all"] = setting(
        "what trains: a linear head, which personal heads leave nothing to share with; an adapter "
        "(of text: LoRA) and a head; or all of the pretrained model"
    )
    rounds: Count = setting(
        "of training, each with a cohort of its own; upcycled: every second trains"
    )

    dataset: Literal[
        "cifar10", "digits", "mnist", "fashion-mnist", "femnist", "letters", "text"
    ] = setting("digits come with the package")
    examples: CountOrZero = setting("drawn of the data set for all clients together; 0: all of it")
    num_users: Count = setting("uldp-avg-w: to whom records in all silos belong, at random")

    # The pretrained model of pictures
    backbone: str = setting("extra pretrained, nothing to download; or torchvision:NAME")
    weights: AbsolutePath = setting("absolute path of its state_dict; empty: that of its package")
    image_size: Count = setting("pixels that pictures are scaled to")
    features_folder: AbsolutePath = setting(
        "absolute path where frozen models' features are kept, a file an example, for other "
        "processes and runs; empty: memory alone"
    )
    adapter_width: Count = setting("numbers between an adapter's two layers")

    # The pretrained model of text
    text_file: AbsolutePath = setting("absolute path of a CSV file with columns text and label")
    text_labels: str = setting('"negative,positive": its classes; rows with others are left out')
    text_model: str = setting("folder of a model and its tokenizer, or a name on the hub")
    max_tokens: Count = setting("of a text; the rest is cut off")
    lora_rank: Count = setting("r")
    lora_only_b: bool = setting("A stays as it is drawn, the same everywhere (FFA-LoRA)")

    # Privacy: the unit is one client; of uldp-avg-w one user.
    sampling_rate: Fraction = setting(
        "share of the clients in a cohort, on average; of uldp-avg-w, of the users"
    )
    delta: FractionBelowOne = setting("at which epsilon holds")
    clipping_norm: Positive = setting("C, of a client's update; one model for all: 0.1 did best")

    head_epochs: CountOrZero = setting("methods with a personal head")
    head_learning_rate: Positive = setting("methods with a personal head")
    sam_radius: NotNegative = setting("q, of sharpness-aware minimisation")
    upcycled: bool = setting("every second round continues along the last step, asking nobody")
    upcycling_coefficient: NotNegative = setting("how far")
    adapt_before_evaluation: bool = setting("train the head on the current extractor first")
