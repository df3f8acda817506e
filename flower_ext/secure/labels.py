"""Keys that serve one purpose each: every use of a secret has its own label."""

from __future__ import annotations

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


def derive(key: bytes, *label: str | int | bytes) -> bytes:
    """Return a 32-byte key for ``label`` only (HKDF-SHA256).

    Each part of the label is encoded with its type and length, so different labels never collide.
    """
    parts = []
    for part in label:
        raw = part if isinstance(part, bytes) else str(part).encode()
        parts.append(type(part).__name__.encode() + b":" + str(len(raw)).encode() + b":" + raw)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=b"".join(parts)).derive(key)
