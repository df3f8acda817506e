"""A deployment before it starts; its processes are in tests/apps/test_deployment.py."""

import tomllib
from pathlib import Path

import pytest

from flower_ext.cli import deployment
from flower_ext.cli.deployment import Deployment


def test_a_deployment_needs_a_node(tmp_path):
    with pytest.raises(ValueError, match="nodes=0: expected at least 1"):
        Deployment(tmp_path, nodes=0)


def test_a_deployment_is_prepared_whatever_its_folder_is_called(tmp_path):
    folder = tmp_path / 'a "quoted" name'
    Deployment(folder, nodes=1).prepare()
    connection = tomllib.loads((folder / "flwr" / "config.toml").read_text(encoding="utf-8"))
    trusted = connection["superlink"]["loopback"]["root-certificates"]
    assert trusted == str(folder / "certificates" / "ca.crt")
    assert Path(trusted).exists()


def test_a_deployment_that_does_not_come_up_ends_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "executable", lambda name: "/bin/false")
    world = Deployment(tmp_path / "world", nodes=1)
    with pytest.raises(deployment.DeploymentFailed, match="nothing listens on port"), world:
        pass
    assert world.superlink is not None
    assert world.superlink.poll() is not None
