"""The settings of this app: those that the package shares, and none of its own."""

from dataclasses import dataclass

from flower_ext.runs.shared_settings import CohortSettings, ReleaseSettings, TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Settings(ReleaseSettings, CohortSettings, TrainingSettings):
    """Client-level privacy."""
