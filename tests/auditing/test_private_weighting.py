"""Encrypted weights equal plain weights at full key size; `test_mechanisms` audits the latter."""

from flower_ext.algorithms.uldp import PrivateWeighting, UldpAvg
from tests.support.private_silos import difference, make, make_openly, start


def test_at_full_key_size_the_model_is_that_of_plain_weights():
    protocol = PrivateWeighting(max_records_per_user=60, precision=1e-6)
    assert protocol.key_bits == 3072
    _, private = start(strategy := make(protocol=protocol), rounds=1)
    assert strategy.refusals == []
    _, plain = start(make_openly(UldpAvg), rounds=1)
    assert difference(private, plain) <= protocol.precision
