"""Numbers of records that users own in silos."""

import numpy as np
import torch


def user_counts(silos, num_users):
    """Return n_{s,u} as int64 (silos, users)."""
    counts = [torch.bincount(silo.owners, minlength=num_users) for silo in silos]
    return torch.stack(counts).numpy()


def records_of(owners, users):
    """Return n_{s,u} (silos, users), counted one by one."""
    counts = np.zeros((len(owners), users), dtype=int)
    for silo, of_records in enumerate(owners):
        for owner in of_records:
            counts[silo, owner] += 1
    return counts
