"""Where random numbers come from: the operating system, or a seed that says so."""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from flower_ext.checks import require_count


def secure_generator() -> np.random.Generator:
    """A cryptographic generator: ChaCha20 under a fresh 256-bit key of the operating system.

    Every call has its own key, so no two releases share a stream.
    """
    from randomgen import ChaCha  # 35 modules, for who adds noise alone

    return np.random.Generator(ChaCha(key=secrets.randbits(256), rounds=20))


def seeded_generator(seed: int, *path: str | int) -> np.random.Generator:
    """A reproducible generator, independent for every ``(seed, *path)``. Simulation only.

    Examples
    --------
    ``seeded_generator(1, "cohort", 3)`` draws the cohort of round 3 in every run with seed 1.
    """
    words = np.frombuffer(_digest(seed, *path), dtype=np.uint32)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(words.tolist())))


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed below 2^63 for another library's generator, independent for each ``(seed, *path)``."""
    return int.from_bytes(_digest(seed, *path)[:8]) >> 1


def _digest(seed: int, *path: str | int) -> bytes:
    require_count("seed", seed)
    return hashlib.sha256(repr((seed, *path)).encode()).digest()
