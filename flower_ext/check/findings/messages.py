"""Find what leaves clients beside the protected update."""

from __future__ import annotations

from collections.abc import Iterator

from flower_ext.check import recognise
from flower_ext.check.app_folder import AppFolder
from flower_ext.check.findings.finding import Finding
from flower_ext.check.held_run import TRAIN
from flower_ext.check.observe import Observed
from flower_ext.check.recognise import Facts
from flower_ext.federation import FederatedStrategy

_NORM_BIT = "norm_bit"


def unprotected_values(real: Observed, facts: Facts, app: AppFolder) -> Iterator[Finding]:
    """Find what leaves clients beside the update."""
    if facts.has_task:
        return
    replies = [reply for reply in real.replies if reply.kind == TRAIN and not reply.error]
    protects_all = not facts.is_ours or facts.has(recognise.OUR_MOD)
    allowed = {facts.weighted_by} if facts.weighted_by and not facts.is_ours else set()
    if facts.has(recognise.CLIENT_ADAPTIVE):
        allowed.add(_NORM_BIT)
    if names := sorted({name for reply in replies for name in reply.metrics} - allowed):
        yield Finding(
            code="metrics",
            text=f"training replies carry values without noise: {_listed(names, app)}",
            remedy="return no metrics of the data from training",
            refutes=protects_all,
        )
    arrays = [sum(kind == "ArrayRecord" for kind, _ in reply.records) for reply in replies]
    if facts.strategies and any(count != 1 for count in arrays):
        yield Finding(
            code="records",
            text=f"training replies carry {max(arrays)} records of arrays; clipping and noise "
            "cover one",
            remedy="return one ArrayRecord",
        )
    if facts.noise is not None and any(reply.integers for reply in replies):
        yield Finding(
            code="integers",
            text="arrays of integers leave, which no Gaussian noise covers",
            remedy="leave counters such as num_batches_tracked out of the ArrayRecord",
        )
    if facts.noise is not None and not facts.is_ours and any(reply.scalars for reply in replies):
        yield Finding(
            code="scalars",
            text="a parameter without axes leaves unclipped",
            remedy="give each parameter an axis",
        )
    layouts = {(reply.records, tuple(reply.metrics)) for reply in replies}
    if facts.strategies and len(layouts) > 1:  # other loops may send messages of several stages
        yield Finding(
            code="names",
            text="names of records or metrics differ between clients, so they may carry data",
            remedy="use fixed names",
        )
    weights = {reply.metrics.get(facts.weighted_by) for reply in replies}
    if facts.noise is not None and facts.noise.cohort and not facts.is_ours and len(weights) > 1:
        yield Finding(
            code="weights",
            text="clients report different weights, which depend on their data",
            remedy="return the same weight from every client",
        )
    scored = [r for r in real.replies if r.kind == "evaluate" and not r.error]
    if names := sorted({name for reply in scored for name in reply.metrics}):
        yield Finding(
            code="evaluation",
            text=f"evaluation replies carry values without noise: {_listed(names, app)}",
            remedy="set fraction_evaluate=0.0, or SecureScores in a ReleasePlan",
            refutes=not facts.has(FederatedStrategy.__name__),
        )


def _listed(names: list[str], app: AppFolder) -> str:
    shown = list(dict.fromkeys(app.shown(name) for name in names))
    return ", ".join(shown[:6]) + (f" and {len(shown) - 6} more" if len(shown) > 6 else "")
