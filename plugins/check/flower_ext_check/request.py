"""The request of a check: the app, and the options of the command."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_ext_check.app_folder import AppFolder
from flower_ext_check.stand_in import Column


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """The options of a check.

    ``log`` is a path for the app's output, and ``config`` has the app's settings. ``seconds`` is
    the longest time of a run. If ``random_data`` is True, an app that loads data by
    ``flwr_datasets`` gets random rows in place of the data. The rows have these ``columns``.
    """

    app: AppFolder
    log: Path
    config: Mapping[str, Any]
    clients: int
    rounds: int
    seconds: float
    random_data: bool
    columns: Mapping[str, Column]
