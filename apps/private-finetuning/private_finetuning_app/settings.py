"""The settings of this app; ``pyproject.toml`` holds their defaults."""

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
        "the last three are without privacy; with uldp-avg-w, clients are silos; own-head is a "
        "control, which shares nothing that is learnt"
    )
    tune: Literal["head", "adapter", "all"] = setting(
        "what trains: a linear head (not for methods with personal heads, which would share "
        "nothing); an adapter (for text: LoRA) and a head; or all of the pretrained model"
    )
    rounds: Count = setting(
        "number of rounds, each with a new cohort; upcycled: only every second round trains"
    )

    dataset: Literal[
        "cifar10", "digits", "mnist", "fashion-mnist", "femnist", "letters", "text"
    ] = setting("digits come with the package")
    examples: CountOrZero = setting(
        "examples drawn for all clients together; 0: the whole data set"
    )
    num_users: Count = setting("uldp-avg-w: number of users; each record gets one at random")

    # The pretrained model of pictures
    backbone: str = setting("efficientnet-lite0 (nothing to download), or torchvision:NAME")
    weights: AbsolutePath = setting(
        "absolute path of the backbone's state_dict; empty: the one of its package"
    )
    image_size: Count = setting("height and width in pixels to which pictures are scaled")
    features_folder: AbsolutePath = setting(
        "absolute path of a folder for features of frozen models, a file per example, which other "
        "processes and runs reuse; empty: features stay in memory"
    )
    adapter_width: Count = setting("numbers between an adapter's two layers")

    # The pretrained model of text
    text_file: AbsolutePath = setting("absolute path of a CSV file with columns text and label")
    text_labels: str = setting(
        'classes of text-file, as "negative,positive"; other rows are left out'
    )
    text_model: str = setting("folder of a model and its tokenizer, or a name on the hub")
    max_tokens: Count = setting("most tokens of a text; the rest is cut off")
    lora_rank: Count = setting("r: rank of LoRA's matrices")
    lora_only_b: bool = setting("only B trains; A stays as drawn, equal on all nodes (FFA-LoRA)")

    # Privacy: the unit is one client; of uldp-avg-w one user.
    sampling_rate: Fraction = setting(
        "share of the clients in a cohort, on average; with uldp-avg-w, share of the users"
    )
    delta: FractionBelowOne = setting("delta at which epsilon holds")
    clipping_norm: Positive = setting(
        "C: clipping norm of a client's update; for one shared model, 0.1 did best"
    )

    head_epochs: CountOrZero = setting("epochs of a personal head")
    head_learning_rate: Positive = setting("learning rate of a personal head")
    sam_radius: NotNegative = setting("q: radius of sharpness-aware minimisation")
    upcycled: bool = setting("every second round extrapolates the last step, and asks no client")
    upcycling_coefficient: NotNegative = setting(
        "upcycled: how far, as a multiple of the last step"
    )
    adapt_before_evaluation: bool = setting(
        "clients train their head on the current extractor before they evaluate"
    )
