"""Command lines of the experiments: options, settings of an app, and changes to a scale."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from benchmarks.runs import APPS, Config
from flower_ext.errors import InvalidValue
from flower_ext.runs.app_settings import checked_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Scale = TypeVar("Scale", bound="DataclassInstance")


def command_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser without options; its help begins with an experiment's docstring."""
    return argparse.ArgumentParser(
        prog=sys.argv[0],  # as ``benchmarks/__main__.py`` names the experiment
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def experiment_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all experiments that keep runs of an app."""
    parser = command_parser(description)
    parser.add_argument("--data-folder", default="", help="folder of the data sets")
    parser.add_argument("--output", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    return parser


def parse_overrides(parser: argparse.ArgumentParser, app: str, texts: Sequence[str]) -> Config:
    """Return ``name=value`` texts as an app's settings; refuse an unfit text by the parser."""
    try:
        return checked_settings(APPS / app, texts)[1]
    except InvalidValue as error:
        parser.error(str(error))


def changed_scale(scale: Scale, arguments: argparse.Namespace, **changes: Any) -> Scale:
    """Return a scale with the values of all options that are named like its fields and are given.

    An option that is not given is None. Lists become tuples.

    Parameters
    ----------
    changes : Any
        Values by the names of fields whose options have another name or form. They go before
        options, and None keeps the field's value.

    Raises
    ------
    TypeError
        A change names no field.
    """
    options = {field.name: getattr(arguments, field.name, None) for field in fields(scale)}
    options |= changes
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None
    }
    return replace(scale, **given)
