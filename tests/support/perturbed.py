"""The model that a perturbation adds noise to."""

from flower_ext.privacy import OutputPerturbation, SeededNoise


def noiseless(model, tau):
    """What `OutputPerturbation` adds noise to."""
    seen = []

    class Watched(SeededNoise):
        def add_gaussian(self, update, stddev, **how):
            seen.append(dict(update))
            return super().add_gaussian(update, stddev, **how)

    OutputPerturbation(clipping_norm=tau, noise_stddev=1.0).apply(model, Watched(0))
    return seen[0]
