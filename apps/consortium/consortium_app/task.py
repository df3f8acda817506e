"""The work of the silos: release statistics of their tables, or train on them."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from consortium_app.settings import Settings
from consortium_app.tables import Table, table_of
from flower_ext.data import Examples, SiloData
from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation import settings_of
from flower_ext.metrics import roc_auc
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import UnfitSetting
from flower_ext.statistics import JointStatistics, read_statistics, statistics_task
from flower_ext.training import Task, accuracy

TEST_SHARE = 0.2
"""Share of a silo's rows that test the model."""


def task_of(context: Context) -> Task:
    """Return the task of a run, for its silos and its server alike."""
    settings = settings_of(Settings, context)
    if settings.method == "statistics":
        return statistics_task(joint_of(settings), partial(whole_table, settings))
    width = len(scales_of(settings))
    return Task(
        model=partial(nn.Linear, width, 2),
        data=partial(standardised, settings),
        metrics={"accuracy": accuracy, "roc_auc": roc_auc},
    )


def joint_of(settings: Settings) -> JointStatistics:
    """Return the statistics that a run releases."""
    try:
        return read_statistics(settings.statistics)
    except InvalidValue as error:
        raise UnfitSetting(f"run-config statistics: {error}") from None


def scales_of(settings: Settings) -> dict[str, tuple[float, float, float, float]]:
    """Return the bounds, centre and deviation of every feature.

    Raises
    ------
    UnfitSetting
        A setting has another form, or ``standardise`` names a column that is no feature.
    """
    scales: dict[str, tuple[float, float, float, float]] = {}
    try:
        for column, bounds in _words(settings.features, 2):
            low, high = map(float, bounds.split(":"))
            scales[column] = low, high, (low + high) / 2, (high - low) / 4
        for column, centre, deviation in _words(settings.standardise, 3):
            low, high, _, _ = scales[column]
            scales[column] = low, high, float(centre), float(deviation)
        if scales and all(scale[3] > 0 for scale in scales.values()):
            return scales
    except (KeyError, ValueError):
        pass
    raise UnfitSetting(
        f"run-config features={settings.features!r}, standardise={settings.standardise!r}: "
        'expected "COLUMN LOWER:UPPER; …" and, of the same columns, "COLUMN CENTRE DEVIATION; …" '
        "with deviations above 0"
    )


def _words(text: str, count: int) -> list[list[str]]:
    parts = [part.split() for part in text.split(";") if part.strip()]
    if any(len(part) != count for part in parts):
        raise ValueError
    return parts


def whole_table(settings: Settings, silo: int) -> SiloData:
    """Return a silo's rows as they are, for statistics."""
    table = table_of(settings, silo)
    columns = {name: torch.from_numpy(column) for name, column in table.columns.items()}
    rows = Examples(columns, torch.zeros(len(table.users), dtype=torch.long))
    return SiloData(train=rows, test=rows.subset([]), owners=torch.from_numpy(table.users))


def standardised(settings: Settings, silo: int) -> SiloData:
    """Return a silo's rows for training and for tests, standardised by public numbers.

    A missing feature becomes the centre, and a row whose target is not 0 or 1 is left out. Each row
    is changed by its own values alone.
    """
    table = table_of(settings, silo)
    scales = scales_of(settings)
    _require_columns(table, [*scales, settings.outcome])
    features = np.column_stack(
        [
            np.nan_to_num((np.clip(table.columns[name], low, high) - centre) / deviation)
            for name, (low, high, centre, deviation) in scales.items()
        ]
    )
    target = table.columns[settings.outcome]
    is_test = seeded_generator(settings.seed, "tests", silo).random(len(target)) < TEST_SHARE
    is_known = (target == 0) | (target == 1)
    parts = []
    for chosen in (is_known & ~is_test, is_known & is_test):
        rows = torch.from_numpy(features[chosen]).float()
        parts.append(Examples(rows, torch.from_numpy(target[chosen]).long()))
    owners = torch.from_numpy(table.users[is_known & ~is_test])
    return SiloData(train=parts[0], test=parts[1], owners=owners)


def _require_columns(table: Table, names: list[str]) -> None:
    """Refuse a table that lacks columns; their names are no person's."""
    if missing := [name for name in names if name not in table.columns]:
        raise tellable(InvalidValue(f"column {', '.join(missing)} is missing in a silo's table"))
