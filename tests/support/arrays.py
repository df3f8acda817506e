"""Arrays of every precision that an update may have."""

import numpy as np
import torch

FLOATS = [
    np.float16,
    np.float32,
    np.float64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def array_of(values, dtype):
    if isinstance(dtype, torch.dtype):
        return torch.as_tensor(values, dtype=dtype)
    return np.asarray(values, dtype=dtype)
