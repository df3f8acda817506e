"""Create keys for nodes, and certificates for a SuperLink on this machine."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

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
    authority = trustme.CA(organization_name="flower-ext loopback authority")
    server = authority.issue_cert(*hosts, not_after=datetime.now(UTC) + timedelta(days=days))
    (folder / "ca.crt").write_bytes(authority.cert_pem.bytes())
    write_whole(folder / "server.key", server.private_key_pem.bytes())
    (certificate,) = server.cert_chain_pems
    (folder / "server.crt").write_bytes(certificate.bytes())
