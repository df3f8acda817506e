"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from dataclasses import dataclass
from typing import Annotated, Literal

from flower_ext.runs.settings import (
    Count,
    CountOrZero,
    Fraction,
    FractionBelowOne,
    NotNegative,
    Positive,
    Rule,
    setting,
)
from flower_ext.runs.shared_settings import ReleaseSettings, ServerSettings, TrainingSettings


def integers(text: str) -> tuple[int, ...] | None:
    """Return the integers of a setting of kind `Integers`; None if the text is empty."""
    return tuple(map(int, text.split(","))) if text else None


def _are_integers(text: str) -> bool:
    return not text or all(part.strip().isdecimal() for part in text.split(","))


Integers = Annotated[str, Rule("integers with commas between them", _are_integers)]


@dataclass(frozen=True, kw_only=True)
class Settings(ReleaseSettings, TrainingSettings, ServerSettings):
    """User-level privacy across silos, by eight methods, and one without privacy."""

    method: Literal[
        "uldp-avg",
        "uldp-avg-w",
        "uldp-sgd",
        "uldp-sgd-w",
        "uldp-naive",
        "uldp-group",
        "uldp-avg-private",
        "uldp-sgd-private",
        "default",
    ] = setting(
        "the private ones weight as -w does, but no party learns the weights (extra weighting); "
        "default is FedAvg with two learning rates, without privacy"
    )

    dataset: Literal[
        "digits",
        "breast-cancer",
        "mnist",
        "creditcard",
        "heart-disease",
        "tcga-brca",
        "tcga-brca-scaled",
    ] = setting("the first two come with the package; the last three consist of silos (4, 6 and 6)")
    model: str = setting("empty: the data set's default")
    num_silos: Count = setting("must equal the number of SuperNodes")
    num_users: CountOrZero = setting("0: the data set's default")
    distribution: Literal["uniform", "zipf"] = setting(
        "how records are divided among users, and users among silos"
    )
    labels_per_user: CountOrZero = setting("most labels of a user's records; 0: any number")

    # Privacy: the unit is one user, with all records in all silos.
    clipping_norm: Positive = setting(
        "clipping norm of a user's update in a silo, or of a silo's update"
    )
    noise_multiplier: NotNegative = setting("sigma: stddev of the noise, in clipping norms")
    delta: FractionBelowOne = setting("delta at which epsilon is reported")
    user_sampling_rate: Fraction = setting(
        "uldp-avg, uldp-sgd: share of users in a round, the same users in all silos"
    )
    aggregation: Literal["plain", "secure"] = setting(
        "plain: the server sees each silo's upload; secure: it sees only sums (uldp-avg, -avg-w, "
        "-sgd, -sgd-w and -naive)"
    )
    colluding_share: FractionBelowOne = setting(
        "secure: share of the silos that may collude with the server"
    )
    dropout_share: FractionBelowOne = setting(
        "secure: share of the silos that may be lost in a round; if more are lost, the round is "
        "discarded"
    )

    # uldp-avg-private and uldp-sgd-private
    protocol: str = setting(
        "paillier, or the name of a plug-in: lattice (flower-ext-lattice) is faster by orders of "
        "magnitude, and experimental: nobody outside this project has reviewed it"
    )
    max_records_per_user: CountOrZero = setting("most records of a user in all silos together")
    silo_record_limits: Integers = setting(
        '"900,600,500": the most records of a user in each silo; paillier: at most '
        "max-records-per-user in sum, so that no user can exceed that; lattice: close to the data, "
        "because set-up takes time in proportion to their sum (empty: max-records-per-user each)"
    )
    key_bits: CountOrZero = setting("paillier: bits of the key")
    precision: NotNegative = setting(
        "paillier: largest error of a coordinate of the sum over silos"
    )
    allowed_totals: Integers = setting(
        'paillier: "10,100,1000": the only totals of records, besides 0, that a user may have'
    )
    draw_choices: CountOrZero = setting(
        "P: 1-out-of-P oblivious transfer draws the users, so that no party knows them; 0: the "
        "server draws them"
    )
    allow_insecure_keys: bool = setting("paillier: allow keys below 3072 bits, for simulation only")

    # uldp-group: records kept of each user, and DP-SGD on them
    group_size: str = setting("records kept of each user: a number, max or median")
    record_clipping_norm: Positive = setting("clipping norm of one record's gradient")
    record_sampling_rate: Fraction = setting("share of a silo's records in a step, on average")
    expected_batch_size: Positive = setting("public number by which sums of gradients are divided")

    local_epochs: Count = setting("local epochs of every user, or of the silo")
    learning_rate: Positive = setting("local learning rate of every user, or of the silo")
    server_learning_rate: NotNegative = setting(
        "0: silos · sqrt(users · epochs) for uldp-avg and -sgd, else 1"
    )
