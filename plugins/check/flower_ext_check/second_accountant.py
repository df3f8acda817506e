"""Compute ε with dp-accounting, which shares no code with the accountants of this package."""

import math

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from flower_ext.privacy import FixedSizeSampling, NeighboringRelation, PoissonSampling
from flower_ext_check.mechanisms import Declared


def second_epsilon(declared: Declared, noise_multiplier: float, delta: float) -> float:
    """Return ε of the declared releases with ``noise_multiplier`` in place of the declared one."""
    if noise_multiplier <= 0:
        return math.inf
    release, count = declared.release, declared.count
    relative = noise_multiplier / release.relation.sensitivity_factor
    queries = [
        (query.noise_multiplier / query.relation.sensitivity_factor, times)
        for query, times in declared.other_queries.items()
    ]
    # Gaussian releases compose to one release. Its 1 / sigma² is the sum of their 1 / sigma².
    sigma = sum(times / sigma**2 for sigma, times in [(relative, count), *queries]) ** -0.5
    without_sampling = float(dp_accounting.get_epsilon_gaussian(sigma, delta))
    sampling, gaussian = release.sampling, dp_accounting.GaussianDpEvent(relative)
    if sampling.sampling_rate == 1 or without_sampling > 1000:
        return without_sampling
    accountant: PLDAccountant | RdpAccountant
    if isinstance(sampling, PoissonSampling):
        accountant = PLDAccountant()
        event = dp_accounting.PoissonSampledDpEvent(sampling.rate, gaussian)
    elif (
        isinstance(sampling, FixedSizeSampling)
        and release.relation is NeighboringRelation.REPLACE_ONE
    ):
        accountant = RdpAccountant(
            neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            sampling.population, sampling.size, gaussian
        )
    else:
        return without_sampling
    accountant.compose(event, count)
    for sigma, times in queries:
        accountant.compose(dp_accounting.GaussianDpEvent(sigma), times)
    return min(without_sampling, float(accountant.get_epsilon(delta)))
