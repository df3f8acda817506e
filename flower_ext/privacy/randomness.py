"""Random generators: cryptographic ones, and reproducible ones for simulation."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING

import numpy as np

from flower_ext.checks import require_count

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import CipherContext


def secure_generator() -> np.random.Generator:
    """Return a ChaCha20 generator under a fresh 256-bit key from the operating system.

    Every call draws a new key, so no two releases share a stream.
    """
    from randomgen import ChaCha  # imports 35 modules, which only callers that add noise need

    return np.random.Generator(ChaCha(key=secrets.randbits(256), rounds=20))


def seeded_generator(seed: int, *path: str | int) -> np.random.Generator:
    """Return a reproducible generator; use it for simulation only.

    Different arguments ``(seed, *path)`` give independent generators.

    Examples
    --------
    ``seeded_generator(1, "cohort", 3)`` draws the cohort of round 3 in every run with seed 1.
    """
    words = np.frombuffer(_digest(seed, *path), dtype=np.uint32)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words.tolist())))


def keyed_generator(key: bytes, *path: str | int) -> np.random.Generator:
    """Return a ChaCha20 generator whose key is HMAC-SHA-256(``key``, ``path``).

    Different paths give independent generators. Everybody who holds ``key`` gets the same numbers,
    and nobody else can predict them.
    """
    from randomgen import ChaCha

    digest = hmac.digest(key, repr(path).encode(), "sha256")
    return np.random.Generator(ChaCha(key=int.from_bytes(digest), rounds=20))


def keystream(key: bytes) -> CipherContext:
    """Return a cipher that turns zeros into the ChaCha20 stream of a key. Use each key once."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    # A counter and nonce of zero are safe, because the key is used once.
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def derived_seed(seed: int, *path: str | int) -> int:
    """Return a seed below 2^63 for a generator of another library.

    Different arguments ``(seed, *path)`` give different seeds.
    """
    return int.from_bytes(_digest(seed, *path)[:8]) >> 1


def _digest(seed: int, *path: str | int) -> bytes:
    require_count("seed", seed)
    return hashlib.sha256(repr((seed, *path)).encode()).digest()
