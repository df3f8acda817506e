"""The apps as tests run them: their own files and defaults, with a few overrides."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from flower_ext.federation.engines.run_app import load_app


@dataclass(frozen=True, kw_only=True)
class App:
    """A folder of ``apps/``, with settings that make its run small."""

    folder: Path
    small: dict[str, Any]

    def config(self, **overrides):
        """Return the app's run config with ``overrides`` (underscores in place of hyphens)."""
        defaults = self._project["config"]
        changes = {name.replace("_", "-"): value for name, value in overrides.items()}
        assert set(changes) <= set(defaults), set(changes) - set(defaults)
        return {**defaults, **changes}

    def small_config(self, **overrides):
        """Return the run config of a small run with ``overrides``."""
        return {**self.config(**overrides), **self.small}

    def parts(self):
        """Return the ServerApp and the ClientApp of the app."""
        return load_app(self.folder)

    def module(self, name):
        """Return a module of the app's package."""
        self.parts()
        return import_module(f"{self.package}.{name}")

    @property
    def package(self):
        """The name of the app's Python package."""
        return self._project["components"]["clientapp"].partition(".")[0]

    @property
    def _project(self):
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]


APPS = Path(__file__).parents[2] / "apps"

DP2_FEDSAM = App(
    folder=APPS / "dp2-fedsam",
    small={
        "clients": 3,
        "sampling": "everyone",
        "partition": "iid",
        "rounds": 2,
        "evaluate-every": 1,
        "seeded-noise": True,
        "noise-multiplier": 0.5,
    },
)
SERVERS = {
    "adam": {
        "server-optimizer": "adam",
        "server-learning-rate": 0.05,
        "server-tau": 0.1,
        "average-decay": 0.5,
    },
    "adaptive": {"clipping": "adaptive", "clipping-norm": 0.01, "clipping-learning-rate": 1.0},
}
"""Settings of DP2_FEDSAM under which a round depends on more of earlier rounds than the model."""
DEMO = App(
    folder=APPS / "demo",
    small={"clients": 30, "sampling-rate": 0.5, "rounds": 2, "evaluate-every": 1},
)
UPCYCLED_FL = App(
    folder=APPS / "upcycled-fl",
    small={
        "method": "scaffold",
        "clients": 3,
        "sampling-rate": 1.0,
        "generated": True,
        "rounds": 4,
        "local-epochs": 2,
        "straggler-ratio": 0.4,
        "evaluate-every": 1,
        "classes": 0,
        "model": "",
        "unit-features": False,
        "solver": "sgd",
        "proximal-weight": 0.0,
        "perturbation": "output",
        "noise-stddev": 0.1,
        "seeded-noise": True,
    },
)
ULDP_FL = App(
    folder=APPS / "uldp-fl",
    small={
        "method": "uldp-avg-w",
        "num-silos": 3,
        "num-users": 20,
        "user-sampling-rate": 0.7,
        "rounds": 2,
        "seeded-noise": True,
        "noise-multiplier": 0.5,
    },
)
DP_DITTO = App(
    folder=APPS / "dp-ditto",
    small={
        "clients": 3,
        "classes-per-client": 4,
        "rounds": 2,
        "evaluate-every": 1,
        "seeded-noise": True,
    },
)
PRIVATE_FINETUNING = App(
    folder=APPS / "private-finetuning",
    small={
        "dataset": "digits",
        "examples": 120,
        "image-size": 32,
        "adapter-width": 8,
        "clients": 3,
        "sampling": "everyone",
        "partition": "iid",
        "rounds": 2,
        "evaluate-every": 1,
        "seeded-noise": True,
        "noise-multiplier": 0.5,
    },
)
PRIVATE_LM = App(
    folder=APPS / "private-lm",
    small={
        "clients": 3,
        "texts-per-client": 8,
        "max-tokens": 16,
        "rounds": 2,
        "evaluate-every": 1,
        "seeded-noise": True,
        "epsilon": 100.0,
    },
)
CONSORTIUM = App(folder=APPS / "consortium", small={"seeded-noise": True})
OWN = App(folder=Path(__file__).parent / "own_app", small={})
TEXTS = App(folder=Path(__file__).parent / "text_project", small={})
EXAMPLES = App(folder=Path(__file__).parent / "flower_examples", small={})
FOREIGN = App(folder=Path(__file__).parent / "foreign_project", small={})
