"""Local training and server optimiser of a method, from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_ext.federation.configured.refusals import naming_settings
from flower_ext.federation.server_optimizers import (
    Adagrad,
    Adam,
    ExponentialAverage,
    ModelAverage,
    Sgd,
    TailAverage,
    Yogi,
)
from flower_ext.runs.settings import UnfitSetting
from flower_ext.runs.shared_settings import ServerSettings, TrainingSettings
from flower_ext.training import LocalTraining


def training(settings: TrainingSettings, **changes: Any) -> LocalTraining:
    """Return the local training that the settings describe; ``changes`` override its fields."""
    same = ("batch_size", "learning_rate", "learning_rate_decay", "momentum", "optimizer")
    options = {name: getattr(settings, name) for name in (*same, "weight_decay")}
    options["epochs"] = settings.local_epochs
    with naming_settings(settings):
        return LocalTraining(**{**options, **changes})


_ADAPTIVE: Mapping[str, Any] = {"adagrad": Adagrad, "adam": Adam, "yogi": Yogi}


def server(settings: ServerSettings, *, learning_rate: float | None = None) -> dict[str, Any]:
    """Return the options ``server`` and ``average`` of a method.

    ``learning_rate`` overrides the setting ``server_learning_rate``.

    Raises
    ------
    UnfitSetting
        The settings name two averages.
    """
    rate = settings.server_learning_rate if learning_rate is None else learning_rate
    momentum, tau = settings.server_momentum, settings.server_tau
    if settings.average_decay and settings.average_last:
        raise UnfitSetting(
            f"run-config average-decay={settings.average_decay!r} with "
            f"average-last={settings.average_last!r}: expected one of them to be 0"
        )
    average: ModelAverage | None = None
    if settings.average_decay:
        average = ExponentialAverage(decay=settings.average_decay)
    elif settings.average_last:
        average = TailAverage(last=settings.average_last)
    if (kind := _ADAPTIVE.get(settings.server_optimizer)) is not None:
        return {"server": kind(learning_rate=rate, beta1=momentum, tau=tau), "average": average}
    return {"server": Sgd(learning_rate=rate, momentum=momentum), "average": average}
