"""One step of `train_dp_sgd` on records at a ReLU's kink, with a record that joins them or not.

Libraries round a pass of three rows otherwise than one of two, and the last bit decides whether a
record at the kink has a large gradient. With passes as wide as their batch, the record that joins
therefore moves the others' gradients as well.
"""

import numpy as np
import pytest
import torch

from flower_ext.data import Examples
from flower_ext.privacy import SecureNoise, SeededNoise, gaussian_loss, secure_generator
from flower_ext.training import ClippedGradient, DpSgdTraining, train_dp_sgd
from flower_ext.training.dp.passes import Passes
from flower_ext_audit import BoundTerms, if_gaussian
from tests.support.keeping import at_a_kink, kinked

DELTA, TRIALS = 1e-5, 3000


def released(gradient, params, records, *, noise_multiplier, noise):
    """Return the update of one step over all records, as one row."""
    training = DpSgdTraining(
        steps=1,
        sampling_rate=1.0,
        batch_size=1.0,
        learning_rate=1.0,
        clipping_norm=1.0,
        noise_multiplier=noise_multiplier,
    )
    silent = ~records.any(dim=1)
    examples = Examples(records, torch.where(silent, -100, 0))
    drawn = secure_generator()
    made = train_dp_sgd(gradient.task, params, examples, training, sampling=drawn, noise=noise)
    return torch.cat([(params[name] - made[name]).double().flatten() for name in params]).numpy()


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("planted", [False, True])
def test_other_records_in_a_pass_give_no_attack(planted, monkeypatch):
    gradient, params = kinked(False)
    # Trials have the usual width, and their result is remembered.
    released(gradient, params, at_a_kink(params, 3), noise_multiplier=1e-6, noise=SeededNoise(0))
    if planted:
        real = ClippedGradient.__call__

        def call(self, params, features, targets):
            self.passes.rows = len(features)
            return real(self, params, features, targets)

        monkeypatch.setattr(ClippedGradient, "__call__", call)
        monkeypatch.setattr(Passes, "width", lambda self, way: self.rows)

    def almost_exact(records):
        return released(gradient, params, records, noise_multiplier=1e-6, noise=SeededNoise(0))

    def with_silent(records, count):
        return torch.cat([records, torch.zeros(count, records.shape[1])])

    pairs = [
        (with_silent(group, count), with_silent(group[1:], count))
        for group in at_a_kink(params, 90).split(3)
        for count in (0, 1, 5)
    ]
    effects = [almost_exact(present) - almost_exact(without) for present, without in pairs]
    worst = int(np.argmax([np.linalg.norm(effect) for effect in effects]))
    length = np.linalg.norm(effects[worst])
    if planted and length < 1.2:
        pytest.skip("rows round alike in every number here")
    direction, (present, without) = effects[worst] / length, pairs[worst]

    def scores(records):
        return np.asarray(
            [
                direction
                @ released(gradient, params, records, noise_multiplier=1.0, noise=SecureNoise())
                for _ in range(TRIALS)
            ]
        )

    reported = gaussian_loss(1.0, releases=1, delta=DELTA).epsilon
    terms = BoundTerms(delta=DELTA, confidence=0.999999, reported=reported)
    bound = if_gaussian(scores(without), scores(present), terms)
    print(f"moved by {length:.3f} C; {bound}")
    assert bound.exceeds is planted, bound
