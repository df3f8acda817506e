"""Numbers of records that users own in silos."""

import torch


def user_counts(silos, num_users):
    """Return n_{s,u} as int64 (silos, users)."""
    counts = [torch.bincount(silo.owners, minlength=num_users) for silo in silos]
    return torch.stack(counts).numpy()
