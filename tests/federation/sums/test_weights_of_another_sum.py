"""A sum of another project weights the users of silos, as a weighted sum does."""

import numpy as np
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp.silo_training import WeightedTotal
from flower_ext.federation import ClientSum, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.federation.sums.plain import PlainSum
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from tests.support.private_silos import make_openly
from tests.support.silos import ROUNDS, SEED, SILOS, task

EQUAL_SUM = records.SUM + "equal"


class EqualSilo(ClientSum):
    """A client's end that gives every user the same weight."""

    name = EQUAL_SUM
    brings_weights = True

    def hidden_sum(self, number, like, users, bound):
        of_users = ClipAndNoise(clipping_norm=bound, noise_stddev=1.0, of_units=True)
        return WeightedTotal(like, of_users, [1 / SILOS] * users)


class EqualSum(PlainSum):
    """A plain sum whose clients weight the users."""

    brings_weights = True

    def open(self, opening):
        plain = super().open(opening)
        plain.request = lambda partition: {EQUAL_SUM: records.bytes_record("round", b"")}
        return plain


def model_after(**options):
    strategy = make_openly(weighting="equal", **options)
    app = strategy.method.client_app(task(), allow_seeded_noise=True, sums=[EqualSilo])
    initial = ArrayRecord(task().initial_params(SEED))
    result = strategy.start(InProcessGrid(app, SILOS), initial, num_rounds=ROUNDS)
    assert strategy.refusals == []
    return records.to_arrays(result.arrays)


def test_a_sum_of_another_project_may_weight_the_users():
    model = model_after(sum=EqualSum)
    for name, array in model_after().items():
        np.testing.assert_array_equal(model[name], array)
