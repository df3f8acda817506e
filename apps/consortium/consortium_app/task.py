"""The work of the silos: statistics of tables, training on the tables, and scores of the model."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from consortium_app.settings import Settings
from consortium_app.tables import Table, num_users_of, table_of
from flower_ext.data import Examples, SiloData
from flower_ext.errors import InvalidValue, knowing_no_data, tellable
from flower_ext.federation import node_settings
from flower_ext.metrics import roc_auc
from flower_ext.privacy import seeded_generator
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import Task, accuracy
from flower_ext_consortium.linkage import read_link_key
from flower_ext_consortium.statistics import JointStatistics, read_statistics, statistics_task

TEST_SHARE = 0.2
"""Share of the people who test the model, with all of their records in all silos."""
RISK, CORRECT, BIAS = "risk", "correct", "bias"
"""Names: the column of the model's probability, the column that is 1 where the model is right, and
the model's constant."""


def task_of(context: Context) -> Task:
    """Return the task of a run, for its silos and its server alike."""
    settings = node_settings(Settings, context)
    if settings.method == "statistics":
        return statistics_task(joint_of(settings), partial(whole_table, settings))
    if settings.method == "scores":
        return statistics_task(joint_of(settings), partial(scored_table, settings))
    width = len(scales_of(settings))
    return Task(
        model=partial(nn.Linear, width, 2),
        data=partial(standardised, settings),
        metrics={"accuracy": accuracy, "roc_auc": roc_auc},
    )


def silo_task_of(context: Context) -> Task:
    """Return a silo's task, with the key by which silos draw users."""
    settings, task = node_settings(Settings, context), task_of(context)
    if settings.draws != "silos":
        return task
    with knowing_no_data():
        return replace(task, draw_key=read_link_key(Path(settings.draw_key)))


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
        A setting is malformed, or ``standardise`` names a column that is not a feature.
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
        'expected features="COLUMN LOWER:UPPER; …" and standardise="COLUMN CENTRE DEVIATION; …", '
        "with columns of features in standardise, LOWER below UPPER, and DEVIATION above 0"
    )


def coefficients_of(settings: Settings) -> dict[str, float]:
    """Return the model's coefficients by feature, and its constant.

    Raises
    ------
    UnfitSetting
        The setting ``model`` is malformed, or lacks a feature.
    """
    expected = [BIAS, *scales_of(settings)]
    try:
        coefficients = {name: float(value) for name, value in _words(settings.model, 2)}
        if [*coefficients] == expected:
            return coefficients
    except ValueError:
        pass
    raise UnfitSetting(
        f"run-config model={settings.model!r}: expected "
        f'"{"; ".join(f"{name} NUMBER" for name in expected)}", as a training writes it to '
        "model.toml in its run directory"
    )


def _words(text: str, count: int) -> list[list[str]]:
    parts = [part.split() for part in text.split(";") if part.strip()]
    if any(len(part) != count for part in parts):
        raise ValueError
    return parts


def whole_table(settings: Settings, silo: int) -> SiloData:
    """Return a silo's rows as they are, for statistics."""
    table = table_of(settings, silo)
    return _rows(table.columns, table.users)


def scored_table(settings: Settings, silo: int) -> SiloData:
    """Return the rows of the people who test the model, with two more columns.

    One column is the risk that the model computes, the other is 1 if its prediction is correct.

    A row whose target is not 0 or 1 is left out.
    """
    table, coefficients = table_of(settings, silo), coefficients_of(settings)
    constant, *slopes = coefficients.values()
    risk = 1 / (1 + np.exp(-(_features(table, settings) @ np.array(slopes) + constant)))
    target = table.columns[settings.outcome]
    columns = {**table.columns, RISK: risk, CORRECT: ((risk > 0.5) == target).astype(float)}
    chosen = _has_target(table, settings) & _tests(table, settings)
    return _rows({name: column[chosen] for name, column in columns.items()}, table.users[chosen])


def _rows(columns: dict[str, np.ndarray], users: np.ndarray) -> SiloData:
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    rows = Examples(tensors, torch.zeros(len(users), dtype=torch.long))
    return SiloData(train=rows, test=rows.subset([]), owners=torch.from_numpy(users))


def standardised(settings: Settings, silo: int) -> SiloData:
    """Return a silo's rows for training and for tests, standardised by public numbers.

    A missing feature becomes the centre, and a row whose target is not 0 or 1 is left out. Neither
    a row's numbers nor its use, for training or for tests, depend on other rows.
    """
    table = table_of(settings, silo)
    features, target = _features(table, settings), table.columns[settings.outcome]
    has_target, tests = _has_target(table, settings), _tests(table, settings)
    parts = []
    for chosen in (has_target & ~tests, has_target & tests):
        rows = torch.from_numpy(features[chosen]).float()
        parts.append(Examples(rows, torch.from_numpy(target[chosen]).long()))
    owners = torch.from_numpy(table.users[has_target & ~tests])
    return SiloData(train=parts[0], test=parts[1], owners=owners)


def _features(table: Table, settings: Settings) -> np.ndarray:
    """Return the standardised features of all rows."""
    scales = scales_of(settings)
    _require_columns(table, [*scales, settings.outcome])
    return np.column_stack(
        [
            np.nan_to_num((np.clip(table.columns[name], low, high) - centre) / deviation)
            for name, (low, high, centre, deviation) in scales.items()
        ]
    )


def _has_target(table: Table, settings: Settings) -> np.ndarray:
    target = table.columns[settings.outcome]
    return np.asarray((target == 0) | (target == 1))


def _tests(table: Table, settings: Settings) -> np.ndarray:
    """Return a mask of the table's rows: True for each row that tests the model.

    All rows of one person are either for tests or for training. The choice of people is public, and
    the same in all silos. It depends on a person's number only.
    If it depended on a row's place in the table, a person who leaves would move other people's rows
    between training and tests.
    """
    people = seeded_generator(settings.seed, "tests").random(num_users_of(settings))
    return np.asarray(people[table.users] < TEST_SHARE)


def _require_columns(table: Table, names: list[str]) -> None:
    """Refuse a table that lacks columns; the error may name them, because names reveal no data."""
    if missing := [name for name in names if name not in table.columns]:
        raise tellable(
            InvalidValue(
                f"column {', '.join(missing)} is missing in a silo's table; "
                "name only columns that the tables of all silos have"
            )
        )
