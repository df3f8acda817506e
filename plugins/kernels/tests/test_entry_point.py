"""The core finds the form of this plug-in by the entry point that its project names."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from flower_ext.training.batched.form import GROUP
from flower_ext_kernels import network

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_the_project_offers_its_form_to_the_group_that_the_core_reads():
    groups = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]
    ((name, value),) = groups[GROUP].items()
    assert EntryPoint(name=name, value=value, group=GROUP).load() is network.form_for
