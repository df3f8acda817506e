"""Deployments before they start; tests/apps/test_deployment.py runs their processes."""

import tomllib
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from flower_ext.cli.processes import LaunchFailed
from tests.support import deployment
from tests.support.deployment import Deployment, make_certificates, make_key


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
    with pytest.raises(LaunchFailed, match="nothing listens on port"), world:
        pass
    assert world.superlink is not None
    assert world.superlink.poll() is not None


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_key_is_ecdsa_p384_private_to_its_user_and_made_once(tmp_path):
    private, public = make_key(tmp_path / "keys", "node-0")
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key.curve, ec.SECP384R1)
    loaded_key = load_ssh_public_key(public.read_bytes())
    form = (Encoding.OpenSSH, PublicFormat.OpenSSH)
    assert loaded_key.public_bytes(*form) == key.public_key().public_bytes(*form)
    assert private.stat().st_mode & 0o777 == 0o600
    assert private.parent.stat().st_mode & 0o777 == 0o700
    before = private.read_bytes()
    assert make_key(tmp_path / "keys", "node-0") == (private, public)
    assert private.read_bytes() == before
    assert make_key(tmp_path / "keys", "node-1")[0].read_bytes() != before


def test_the_certificate_is_the_authority_s_and_names_its_hosts(tmp_path):
    make_certificates(tmp_path)
    root, leaf = certificate(tmp_path / "ca.crt"), certificate(tmp_path / "server.crt")
    leaf.verify_directly_issued_by(root)
    with pytest.raises((InvalidSignature, ValueError)):
        root.verify_directly_issued_by(leaf)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1")]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    lasts = leaf.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=364) < lasts <= timedelta(days=365)
    assert (tmp_path / "server.key").stat().st_mode & 0o777 == 0o600


def test_certificates_that_are_there_stay(tmp_path):
    make_certificates(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    make_certificates(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
