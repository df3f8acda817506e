"""``flower-ext`` finds the command of this plug-in by the entry point that its project names."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from flower_ext.cli.main import PLUGINS
from flower_ext_check import command

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_the_project_offers_its_command_to_the_group_that_the_core_reads():
    group = "flower_ext.commands"
    ((name, value),) = PROJECT["entry-points"][group].items()
    assert EntryPoint(name=name, value=value, group=group).load() is command.check
    assert PLUGINS[name] == PROJECT["name"]
