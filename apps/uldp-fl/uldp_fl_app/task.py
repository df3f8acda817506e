"""The learning problem that the run configuration asks for."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context
from torch import Tensor
from torch.nn.functional import cross_entropy

from flower_ext.data import SiloData
from flower_ext.federation import node_settings
from flower_ext.metrics import average_precision, roc_auc
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import Task, accuracy
from flower_ext.training.models import build
from uldp_fl_app.settings import Settings
from uldp_fl_app.silos import describe_silos, load_silos
from uldp_fl_app.survival import concordance_index, cox_loss

SURVIVAL = ("tcga-brca", "tcga-brca-scaled")
METRICS: dict[str, Mapping[str, Callable[[Tensor, Tensor], float]]] = {
    **{name: {"concordance": concordance_index} for name in SURVIVAL},
    # 98 of 100 records are no fraud, so knowing nothing has an accuracy of 0.98.
    "creditcard": {
        "accuracy": accuracy,
        "average_precision": average_precision,
        "roc_auc": roc_auc,
    },
}


def task_of(context: Context) -> Task:
    """Return the task of a run, for its silos and its server alike."""
    settings = node_settings(Settings, context)
    dataset = settings.dataset
    info = describe_silos(dataset)
    model = settings.model or info.model
    silos = silos_of(settings)
    return Task(
        model=partial(build, model, num_classes=info.num_classes),
        data=lambda silo: silos[silo],
        loss=cox_loss if dataset in SURVIVAL else cross_entropy,
        metrics=METRICS.get(dataset, {"accuracy": accuracy}),
    )


def num_users_of(settings: Settings) -> int:
    """Return |U|, the number of users; by default the data set's number."""
    return settings.num_users or describe_silos(settings.dataset).num_users


def group_size_of(settings: Settings) -> int | str:
    """Return the group size: a number, ``max`` or ``median``."""
    value = settings.group_size
    if value not in ("max", "median") and not value.isdecimal():
        raise UnfitSetting(
            f"run-config group-size={value!r}: expected a whole number, max or median"
        )
    return int(value) if value.isdecimal() else value


@lru_cache(maxsize=1)
def silos_of(settings: Settings) -> list[SiloData]:
    """Return all silos, read or drawn once per run and the same in every process."""
    return load_silos(
        settings.dataset,
        Path(settings.data_folder) if settings.data_folder else None,
        num_users=num_users_of(settings),
        num_silos=settings.num_silos,
        distribution=settings.distribution,
        labels_per_user=settings.labels_per_user or None,
        seed=settings.seed,
    )
