"""Translate Flower's privacy events into releases, and store them.

An event says less than a theorem needs. This module interprets it as follows:

===================  =====================  ========================================================
sampling_method      neighboring_relation   accounted as
===================  =====================  ========================================================
no-amplification     add-or-remove-one      exact Gaussian composition. The relation that holds is
                                            replace-special: in cohorts of a fixed size, an added
                                            client takes the place of another.
poisson              add-or-remove-one      sub-sampled Gaussian (PLD), if ``secret_sampling``
without-replacement  replace-one            sampling without replacement (RDP), sensitivity 2, if
                                            ``secret_sampling``. Flower's `RdpAccountant` takes
                                            sensitivity 1 there, and prints a smaller ε.
===================  =====================  ========================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flwr.serverapp import GaussianPrivacyEvent, PrivacyConfig, SamplingMethod

from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NeighboringRelation,
    PoissonSampling,
    Release,
    Sampling,
)

_SCHEMA, _BACKEND = 1, "flower_ext.pld"
_READABLE = (_BACKEND, "rdp")
"""Backends whose state is a list of events: this package's, and Flower's own accountant."""

Events = list[tuple[GaussianPrivacyEvent, int]]
"""Events with their counts, in the order of their composition."""


def relation_of(config: PrivacyConfig) -> NeighboringRelation:
    """Return the relation that holds under a configuration, which may claim another one."""
    if config.sampling_method is SamplingMethod.NO_AMPLIFICATION:
        return NeighboringRelation.REPLACE_SPECIAL
    return NeighboringRelation(config.neighboring_relation.value)


def release_of(event: GaussianPrivacyEvent, config: PrivacyConfig) -> Release:
    """Return an event as a release of this package's accounting.

    Raises
    ------
    InvalidValue
        The event is of another population.
    """
    population, method = config.population_size, config.sampling_method
    if event.population_size != population:
        raise InvalidValue(
            f"population_size={event.population_size} of the event: expected {population}, as in "
            "the configuration"
        )
    sampling: Sampling = FullParticipation(population)
    if method is SamplingMethod.POISSON:
        sampling = PoissonSampling(population, event.sample_size / population)
    elif method is SamplingMethod.WITHOUT_REPLACEMENT:
        sampling = FixedSizeSampling(population, event.sample_size)
    return Release(
        sampling=sampling, noise_multiplier=event.noise_multiplier, relation=relation_of(config)
    )


def event_of(release: Release, config: PrivacyConfig) -> GaussianPrivacyEvent:
    """Return the event of a release; the inverse of `release_of`.

    Raises
    ------
    InvalidValue
        Under this configuration, no event is such a release.
    """
    event = GaussianPrivacyEvent(
        noise_multiplier=release.noise_multiplier,
        sample_size=max(1, round(release.sampling.expected_cohort_size)),
        population_size=release.sampling.population,
    )
    if release_of(event, config) != release:
        raise InvalidValue(
            f"the ledger holds a release ({release.to_dict()!r}) of another kind than this "
            "configuration's: give each run a ledger of its own"
        )
    return event


def write_state(
    events: Sequence[tuple[GaussianPrivacyEvent, int]], config: PrivacyConfig
) -> dict[str, object]:
    """Return events and their configuration, ready for JSON."""
    return {
        "schema_version": _SCHEMA,
        "backend": _BACKEND,
        "config": _plain(config),
        "compositions": [{"event": asdict(event), "count": count} for event, count in events],
    }


def read_state(state: Mapping[str, Any], config: PrivacyConfig) -> Events:
    """Return the events of a state of this package or of Flower's `RdpAccountant`.

    Raises
    ------
    InvalidValue
        The state is of another configuration or backend, or cannot be read.
    """
    schema, backend = state.get("schema_version"), state.get("backend")
    if schema != _SCHEMA or backend not in _READABLE:
        raise InvalidValue(
            f"state of backend {backend!r}, schema {schema!r}: expected {_BACKEND!r}, {_SCHEMA}"
        )
    if state.get("config") != _plain(config):
        raise InvalidValue(
            f"config={state.get('config')!r} of the state: expected {_plain(config)}"
        )
    events: Events = []
    try:
        for one in state["compositions"]:
            event, count = GaussianPrivacyEvent(**one["event"]), one["count"]
            check_count(count)
            release_of(event, config)
            events.append((event, count))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(f"compositions of the state cannot be read: {error}") from error
    return events


def check_count(count: int) -> None:
    """Refuse a count that is not an integer above 0."""
    if type(count) is not int:
        raise InvalidValue(f"count={count!r}: expected an integer >= 1")
    require_at_least_one("count", count)


def _plain(config: PrivacyConfig) -> dict[str, object]:
    return {
        **asdict(config),
        "neighboring_relation": config.neighboring_relation.value,
        "sampling_method": config.sampling_method.value,
    }
