"""Pictures of a data set, and the pretrained image model that turns them into features."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch import nn

from flower_ext.data import Examples, describe, load
from flower_ext.runs.settings import absolute_path
from flower_ext.training.models import HeadedModel
from private_finetuning_app.backbones import Backbone
from private_finetuning_app.parts import Adapter, without_statistics
from private_finetuning_app.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """A data set, and the model that turns its pictures into features."""

    dataset: str
    folder: str
    backbone: str
    weights: Path | None
    image_size: int
    adapter_width: int

    headed = HeadedModel
    adapts_features = True  # the adapter follows the backbone, whose features are computed once

    @classmethod
    def of(cls, settings: Settings) -> "Pictures":
        """Return the data set and backbone that the settings name."""
        return cls(
            dataset=settings.dataset,
            folder=settings.data_folder,
            backbone=settings.backbone,
            weights=absolute_path(settings.weights),
            image_size=settings.image_size,
            adapter_width=settings.adapter_width,
        )

    @property
    def num_classes(self) -> int:
        """Number of classes in the data set."""
        return describe(self.dataset).num_classes

    @property
    def width(self) -> int:
        """Number of features of a picture."""
        return width_of(self)

    def pool(self) -> Examples:
        """Return all examples, which are divided among clients."""
        return load(self.dataset, Path(self.folder) if self.folder else None)

    def frozen(self) -> nn.Module:
        """Return the pretrained model, which turns pictures into features."""
        return Backbone(
            self.backbone,
            dataset=self.dataset,
            image_size=self.image_size,
            weights=self.weights,
        )

    def adapted(self) -> nn.Module:
        """Return the adapter that trains between features and head."""
        return Adapter(self.width, self.adapter_width)

    def whole(self) -> nn.Module:
        """Return the pretrained model for training all of it."""
        return without_statistics(self.frozen())


@cache
def width_of(pictures: Pictures) -> int:
    """Return how many features the pretrained model computes for a picture."""
    return int(pictures.frozen().width)
