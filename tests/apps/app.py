"""The DP²-FedSAM app as tests run it: its own files, its own defaults, a few overrides."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path

APP = Path(__file__).parents[2] / "apps" / "dp2_fedsam"

SMALL = {
    "clients": 3,
    "sampling": "everyone",
    "partition": "iid",
    "rounds": 2,
    "evaluate-every": 1,
    "seeded-noise": True,
    "noise-multiplier": 0.5,
}


def config(**overrides):
    """The app's run config with ``overrides`` (underscores for hyphens)."""
    defaults = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    changes = {name.replace("_", "-"): value for name, value in overrides.items()}
    assert set(changes) <= set(defaults)
    return {**defaults, **changes}


def parts():
    """(ServerApp, ClientApp) of the app."""
    if str(APP) not in sys.path:
        sys.path.insert(0, str(APP))
    return tuple(
        importlib.import_module(f"dp2_fedsam_app.{side}_app").app for side in ("server", "client")
    )
