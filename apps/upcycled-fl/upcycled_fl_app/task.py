"""The learning problem that the run configuration asks for."""

from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context

from flower_ext.data import ClientData, within_unit_ball
from flower_ext.federation import node_settings
from flower_ext.privacy import LocalObjective
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import Task
from flower_ext.training.models import build
from upcycled_fl_app.devices import DevicesInfo, describe_devices, load_devices
from upcycled_fl_app.settings import Settings

# Known facts about a model's cross-entropy if no record has a norm above 1. The gradient of
# softmax regression is (p − e_y) ⊗ (x, 1): at most √2 · √2.
LOSSES = {
    "synthetic-logistic": LocalObjective(convex=True, gradient_bound=2.0),
    "binary-logistic": LocalObjective(
        convex=True,
        generalised_linear=True,
        gradient_bound=1.0,
        curvature_bound=0.25,
        feature_norm_bound=1.0,
    ),
}


def task_of(context: Context) -> Task:
    """Return the task of a run, for its clients and its server alike."""
    settings = node_settings(Settings, context)
    facts, model = data_facts(settings), model_name(settings)
    return Task(
        model=partial(build, model, num_classes=facts.num_classes),
        data=lambda client: devices(settings)[client],
    )


def data_facts(settings: Settings) -> DevicesInfo:
    """Return classes, model and source of the data set."""
    return describe_devices(
        settings.dataset,
        folder(settings.data_folder),
        num_classes=classes_of(settings),
        generated=settings.generated,
    )


def classes_of(settings: Settings) -> int | None:
    """Return the configured number of classes; None unless the devices are synthetic."""
    synthetic = settings.dataset.startswith("synthetic")
    return settings.classes or None if synthetic else None


def model_name(settings: Settings) -> str:
    """Return the name of the configured model, or of the data set's."""
    facts = data_facts(settings)
    name = settings.model or facts.model
    if name == "binary-logistic" and facts.num_classes != 2:
        raise UnfitSetting(
            f"run-config model={name!r} with {facts.num_classes} classes: expected two classes; "
            "or, for the data set's own model, set model='' and solver='sgd'"
        )
    return name


def loss_of(settings: Settings) -> LocalObjective:
    """Return the properties of the model's loss that objective perturbation needs.

    The bounds on the loss hold only for features of norm at most 1. Without ``unit-features``, all
    bounds of the result are therefore infinite.
    """
    loss = LOSSES.get(model_name(settings), LocalObjective())
    if settings.unit_features:
        return loss
    return LocalObjective(convex=loss.convex, generalised_linear=loss.generalised_linear)


@lru_cache(maxsize=1)
def devices(settings: Settings) -> list[ClientData]:
    """Return all devices, read or drawn once per run and the same in every process."""
    loaded = load_devices(
        settings.dataset,
        folder(settings.data_folder),
        num_devices=settings.clients,
        num_classes=classes_of(settings),
        seed=settings.seed,
        generated=settings.generated,
    )
    return within_unit_ball(loaded) if settings.unit_features else loaded


def folder(name: str) -> Path | None:
    """Return a configured folder; None if the name is empty."""
    return Path(name) if name else None
