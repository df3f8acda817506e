"""``flower-ext`` finds the commands of this plug-in by the entry points that its project names."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

from flower_ext.cli.main import PLUGINS
from flower_ext_planner.calibrate import calibrate
from flower_ext_planner.ditto_schedule import ditto_schedule

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_the_project_offers_its_commands_to_the_group_that_the_core_reads():
    group = "flower_ext.commands"
    values = PROJECT["entry-points"][group]
    loaded = {
        name: EntryPoint(name=name, value=value, group=group).load()
        for name, value in values.items()
    }
    assert loaded == {"calibrate": calibrate, "ditto-schedule": ditto_schedule}
    assert {PLUGINS[name] for name in loaded} == {PROJECT["name"]}
