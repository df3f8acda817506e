"""Privacy losses of equal releases."""

from flower_ext.privacy import Release, privacy_loss_of


def privacy_loss(*, sampling, noise_multiplier, rounds, delta, relation, accountant="pld"):
    """Return (ε, δ) after ``rounds`` equal releases."""
    release = Release(sampling=sampling, noise_multiplier=noise_multiplier, relation=relation)
    return privacy_loss_of({release: rounds}, delta=delta, accountant=accountant)
