"""The settings of this app; ``pyproject.toml`` holds their defaults."""

from dataclasses import dataclass
from typing import Literal

from flower_ext.runs.settings import Count, CountOrZero, Fraction, FractionBelowOne, setting
from flower_ext.runs.shared_settings import ReleaseSettings, ServerSettings, TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Settings(ReleaseSettings, TrainingSettings, ServerSettings):
    """User-level DP for statistics of people in several silos, and for a model of their records."""

    method: Literal["statistics", "uldp-avg-w", "scores"] = setting(
        "statistics: one round that releases what `statistics` names; uldp-avg-w: training; "
        "scores: statistics of the people who test the model, with the columns risk and correct"
    )

    dataset: Literal["invented", "heart-disease", "tcga-brca", "files"] = setting(
        "invented patients come with the app; files: a CSV file for each silo"
    )
    num_silos: Count = setting("must equal the number of SuperNodes")
    num_users: CountOrZero = setting(
        "people in all silos together, or buckets of `flower-ext link`; 0: the data set's"
    )
    table: str = setting("files: name of a silo's file in data-folder; {silo} is its number")
    user_column: str = setting("files: column with the numbers of users")

    statistics: str = setting("statistics to release, with semicolons between them")
    features: str = setting('training: columns with public bounds, "age 20:90; pressure 80:200"')
    standardise: str = setting(
        'training: centre and deviation of columns, "age 54.1 9.2; …", as `flower-ext stats` '
        "writes them; a column that is missing here is scaled by its bounds"
    )
    outcome: str = setting("training: column with 0 or 1 to predict")
    model: str = setting(
        'scores: coefficients, "bias -0.3; age 0.8", as a training writes them to model.toml'
    )

    # Privacy: the unit is one user, with all records in all silos.
    clipping_norm: float = setting(
        "clipping norm of a user's update in a silo; statistics and scores: 1"
    )
    delta: FractionBelowOne = setting("delta at which epsilon holds")
    user_sampling_rate: Fraction = setting("training: share of users in a round, on average")
    draws: Literal["server", "silos"] = setting(
        "training with a user-sampling-rate below 1: the party that draws the users; silos: by "
        "draw-key, so that the server does not learn who is drawn"
    )
    draw_key: str = setting(
        "draws=silos: file of `flower-ext link key`, in the node config of each SuperNode or as a "
        "setting; equal in all silos"
    )
