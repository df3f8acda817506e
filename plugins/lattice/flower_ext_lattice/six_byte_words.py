"""Numbers below 2^48 as little-endian words of six bytes."""

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 6


def pack(numbers: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Return numbers (count,) as words (count, 6). Bits above the lowest 48 are dropped."""
    raw = np.ascontiguousarray(numbers.astype("<u8", copy=False)).view(np.uint8)
    return raw.reshape(-1, 8)[:, :WORD_BYTES]


def unpack(words: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Return the numbers (count,) of words (count, 6)."""
    raw = np.zeros((len(words), 8), np.uint8)
    raw[:, :WORD_BYTES] = words
    return raw.view("<u8")[:, 0]
