"""Configurations of Flower's strategies with privacy."""

from flwr.serverapp import (
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)

DELTA, POPULATION = 1e-5, 100
KINDS = {
    "no-amplification": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "poisson": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "without-replacement": NeighboringRelation.REPLACE_ONE,
}


def config(kind: str = "no-amplification", population=POPULATION, **more) -> PrivacyConfig:
    return PrivacyConfig(
        target_delta=DELTA,
        population_size=population,
        neighboring_relation=KINDS[kind],
        sampling_method=SamplingMethod(kind),
        **more,
    )
