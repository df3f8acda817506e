"""The settings of this app."""

from dataclasses import dataclass

from flower_ext.runs.settings import setting
from flower_ext.runs.shared_settings import CohortSettings, ReleaseSettings, TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Settings(ReleaseSettings, CohortSettings, TrainingSettings):
    """Client-level privacy for a pretrained text model."""

    base: str = setting("folder of the pretrained model and its tokenizer, or its name on a hub")
    texts: str = setting("file with the columns text and label")
    personal_head: bool = setting("true: each client keeps a classifier of its own")
