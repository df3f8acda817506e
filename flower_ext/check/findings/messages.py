"""Find what clients send besides the protected update, such as metrics and integer arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from flower_ext.check import recognise
from flower_ext.check.findings.finding import Finding, Rule, findings_of
from flower_ext.check.held_run import TRAIN
from flower_ext.check.probes import Probes
from flower_ext.federation import FederatedStrategy

_NORM_BIT = "norm_bit"
_MOST_SHOWN = 6


def _metrics(probes: Probes, kind: str, allowed: Collection[str] = ()) -> dict[str, str] | None:
    """Return a text that lists the metrics in replies of one kind, without those in ``allowed``.

    None if there are no such metrics.
    """
    names = {name for reply in probes.real.answers(kind) for name in reply.metrics}
    if not (names := names - set(allowed)):
        return None
    shown = list(dict.fromkeys(probes.app.shown(name) for name in sorted(names)))
    more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
    return {"names": ", ".join(shown[:_MOST_SHOWN]) + more}


def _training_metrics(probes: Probes) -> dict[str, str] | None:
    traits, allowed = probes.traits, set[str]()
    if traits.weighted_by and not traits.is_ours:
        allowed.add(traits.weighted_by)
    if traits.has(recognise.CLIENT_ADAPTIVE):
        allowed.add(_NORM_BIT)
    return _metrics(probes, TRAIN, allowed)


def _odd_records(probes: Probes) -> dict[str, int] | None:
    """Return the largest number of array records in a training reply.

    None if every reply has exactly one, or if no strategy runs the rounds.
    """
    replies = probes.real.answers(TRAIN)
    counts = [sum(kind == "ArrayRecord" for kind, _ in reply.records) for reply in replies]
    is_odd = probes.traits.strategies and any(count != 1 for count in counts)
    return {"most": max(counts)} if is_odd else None


def _layouts_differ(probes: Probes) -> bool:
    # An app's own loop may send several kinds of messages.
    layouts = {(reply.records, tuple(reply.metrics)) for reply in probes.real.answers(TRAIN)}
    return bool(probes.traits.strategies) and len(layouts) > 1


def _weights_differ(probes: Probes) -> Any:
    traits, replies = probes.traits, probes.real.answers(TRAIN)
    weights = {reply.metrics.get(traits.weighted_by) for reply in replies}
    return traits.noise and traits.noise.cohort and not traits.is_ours and len(weights) > 1


RULES = (
    Rule(
        code="metrics",
        when=_training_metrics,
        text="training replies carry values without noise: {0[names]}",
        remedy="return no metrics of the data from training",
        refutes=lambda probes: not probes.traits.is_ours or probes.traits.has(recognise.OUR_MOD),
    ),
    Rule(
        code="records",
        when=_odd_records,
        text="training replies carry {0[most]} records of arrays; clipping and noise cover one",
        remedy="return one ArrayRecord",
    ),
    Rule(
        code="integers",
        when=lambda probes: (
            probes.traits.noise and any(reply.integers for reply in probes.real.answers(TRAIN))
        ),
        text="clients send arrays of integers, which Gaussian noise does not cover",
        remedy="leave counters such as num_batches_tracked out of the ArrayRecord",
    ),
    Rule(
        code="scalars",
        when=lambda probes: (
            probes.traits.noise
            and not probes.traits.is_ours
            and any(reply.scalars for reply in probes.real.answers(TRAIN))
        ),
        text="a parameter without axes (a single number) leaves clients without clipping",
        remedy="give each parameter an axis",
    ),
    Rule(
        code="names",
        when=_layouts_differ,
        text="names of records or metrics differ between clients, so they may carry data",
        remedy="use fixed names",
    ),
    Rule(
        code="weights",
        when=_weights_differ,
        text="clients report different weights, which depend on their data",
        remedy="return the same weight from every client",
    ),
    Rule(
        code="evaluation",
        when=lambda probes: _metrics(probes, "evaluate"),
        text="evaluation replies carry values without noise: {0[names]}",
        remedy="set fraction_evaluate=0.0, or SecureScores in a ReleasePlan",
        refutes=lambda probes: not probes.traits.has(FederatedStrategy.__name__),
    ),
)


def unprotected_values(probes: Probes) -> Iterator[Finding]:
    """Find what clients send besides the update."""
    if not probes.traits.has_task:
        yield from findings_of(RULES, probes)
