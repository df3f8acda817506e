"""Compare the package with its plain reference loops."""

import torch

from tests.support.worlds import Net


def flat(params):
    """Return the parameters of a `Net` as one vector, as the reference loops store models."""
    names = [name for name, _ in Net().named_parameters()]
    assert set(params) == set(names)
    return torch.cat([params[name].flatten() for name in names])


def close(ours, theirs):
    """Assert that two tensors, or models with the same names, agree to 1e-5."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
