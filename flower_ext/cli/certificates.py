"""Create keys for nodes, and certificates for a SuperLink on this machine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from flower_ext.runs.files import write_whole


def make_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of an ECDSA P-384 key pair; create the pair if it does not exist.

    The private key is ``NAME`` (mode 600), the public key ``NAME.pub``.
    """
    private, public = folder / name, folder / f"{name}.pub"
    if not private.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP384R1())
        openssh = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        public.write_bytes(openssh + b"\n")
        write_whole(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    return private, public


def make_certificates(folder: Path, *, hosts: tuple[str, ...], days: int = 365) -> None:
    """Create ``ca.crt``, and ``server.crt`` with ``server.key`` (mode 600) for ``hosts``.

    The function does not store the authority's private key, so another server needs a new
    authority. If ``server.crt`` exists, the function changes nothing.
    """
    if (folder / "server.crt").exists():
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    since = datetime.now(UTC) - timedelta(minutes=5)  # the clocks of two machines differ
    issuer = _name("flower-ext loopback authority")
    issued = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .not_valid_before(since)
        .not_valid_after(since + timedelta(days=days))
    )
    root = (
        issued.subject_name(issuer)
        .public_key(authority.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority, hashes.SHA384())
    )
    leaf = (
        issued.subject_name(_name(hosts[0]))
        .public_key(server.public_key())
        .serial_number(x509.random_serial_number())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        .sign(authority, hashes.SHA384())
    )
    (folder / "ca.crt").write_bytes(root.public_bytes(Encoding.PEM))
    own = server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_whole(folder / "server.key", own)
    (folder / "server.crt").write_bytes(leaf.public_bytes(Encoding.PEM))


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
