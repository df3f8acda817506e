"""The package next to its plain loops."""

import torch

from tests.support.worlds import Net


def flat(params):
    """The parameters of a `Net` as one vector, as loops write models."""
    names = [name for name, _ in Net().named_parameters()]
    assert set(params) == set(names)
    return torch.cat([params[name].flatten() for name in names])


def close(ours, theirs):
    """Assert that two tensors, or models with the same names, agree to 1e-5."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
