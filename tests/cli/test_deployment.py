"""Deployments before they start; tests/apps/test_deployment.py runs their processes."""

import socket
import tomllib
from pathlib import Path

import pytest

from flower_ext.cli import deployment
from flower_ext.cli.deployment import Deployment
from flower_ext.cli.processes import HOST, ProcessFailed


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
    with pytest.raises(ProcessFailed, match="nothing listens on port"), world:
        pass
    assert world.superlink is not None
    assert world.superlink.poll() is not None


def test_a_port_in_use_is_named_with_what_changes_it(tmp_path):
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        world = Deployment(tmp_path / "world", nodes=1, port=port)
        with pytest.raises(ProcessFailed, match=f"port {port} .* in use .* --port=N"), world:
            pass
    assert world.superlink is None
