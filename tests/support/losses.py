"""Privacy losses of equal releases."""

from itertools import count

from flower_ext.privacy import Release, privacy_loss_of


def privacy_loss(*, sampling, noise_multiplier, rounds, delta, relation, accountant="pld"):
    """Return (ε, δ) after ``rounds`` equal releases."""
    release = Release(sampling=sampling, noise_multiplier=noise_multiplier, relation=relation)
    return privacy_loss_of({release: rounds}, delta=delta, accountant=accountant)


def most_rounds(*, epsilon, delta, sampling, noise_multiplier):
    """Return the largest number of equal releases whose ε is at most ``epsilon``."""
    terms = {"delta": delta, "sampling": sampling, "noise_multiplier": noise_multiplier}
    terms["relation"] = sampling.default_relation
    rounds = (n for n in count() if privacy_loss(rounds=n + 1, **terms).epsilon > epsilon)
    return next(rounds)
