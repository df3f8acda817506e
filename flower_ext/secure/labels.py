"""Keys that belong to one purpose: every use of a secret gets a label of its own."""

from __future__ import annotations

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


def derive(key: bytes, *label: str | int | bytes) -> bytes:
    """Return a 32-byte key that belongs to ``label`` alone (HKDF-SHA256).

    Every part of the label carries its type and length, so no two labels read the same.
    """
    parts = []
    for part in label:
        raw = part if isinstance(part, bytes) else str(part).encode()
        parts.append(type(part).__name__.encode() + b":" + str(len(raw)).encode() + b":" + raw)
    return HKDF(algorithm=SHA256(), length=32, salt=None, info=b"".join(parts)).derive(key)
