"""Assumptions about silos with users in common, and the noise in secure sums of their uploads.

The members of a secure sum are the n silos, all of them in every round. At least m silos answer,
and each adds a discrete Gaussian share of variance σ²C²/m. Let c silos collude with the server.
They can subtract their own shares of the noise, and their own uploads before noise, from the sum.

* Weights by records: a user may have all its weight in honest silos, and then moves their sum by C.
  Their sum carries at least m − c shares of noise, so the noise multiplier is σ√((m − c)/m).
* Equal weights: a user moves the sum of h' honest silos by C h'/n, and this sum carries noise of
  stddev σC √(h'/m). The noise multiplier is σ n/√(m h') ≥ σ, so collusion costs nothing.
* ULDP-NAIVE: a user moves the sum of h' honest silos by 2C h', and this sum carries noise of stddev
  σC n √(h'/m). The noise multiplier is (σ/2) n/√(m h') ≥ σ/2, so again collusion costs nothing.

With secure sums, users may be drawn by Poisson sampling, although clients may not. The number of
silos that are asked, the number of shares in a sum and the size of each share depend on n and m
only, so the noise does not reveal the number of drawn users. The server draws the users and tells
the silos, so sampling amplifies nothing against a server that sees sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flower_ext.privacy.mechanisms.masked_noised_sum import MaskedNoisedSum
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.claims import (
    DISCRETE,
    NONE_OF_THEM,
    NOT_PROVIDED,
    ON_A_GRID,
    OUTLIVES,
    SECURE_SUM,
    WHOLE_UPLOADS,
    Claims,
    SumAssumptions,
)
from flower_ext.privacy.theorems.client_level import of_secure_sum
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit

_OF_DATA = (
    "the numbers of users, silos and rounds are public",
    "users have the same id in every silo",
    "no user's records keep a silo from loading its data (Task.data)",
    OUTLIVES,
)
_SILOS = "silos train, clip and add noise as instructed, and do not collude"
OF_SILOS = (*_OF_DATA, _SILOS, ON_A_GRID)
_OWN_RECORDS = "ε covers only those of a user's records that no colluding silo holds"
NO_SECURE_SUM_OF_SILOS = f"secure aggregation, {NOT_PROVIDED}: the server sees no silo's upload"
"""Assumption of guarantees about sums, if silos send their uploads without a secure sum."""


def user_claims(delta: float, *assumptions: str, not_covered: Sequence[str] = ()) -> Claims:
    """Return a `Claims` whose privacy unit is one user, with records in several silos."""
    return Claims(
        unit=PrivacyUnit.USER,
        relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        delta=delta,
        assumptions=assumptions,
        not_covered=not_covered,
    )


def sums_of_silos(mechanism: NoisedSum, secure_sum: str = NO_SECURE_SUM_OF_SILOS) -> SumAssumptions:
    """Return the assumptions about the silos' sums.

    If the plan has no `SecureSum`, ``secure_sum`` is the assumption under which the server sees no
    single upload.
    """
    if not isinstance(mechanism, MaskedNoisedSum):
        return SumAssumptions(
            noise=ON_A_GRID,
            parties=(*_OF_DATA, _SILOS),
            sums=(WHOLE_UPLOADS, secure_sum),
            published=(NO_SECURE_SUM_OF_SILOS,),
            share="|S|",
        )
    return SumAssumptions(
        noise=DISCRETE,
        parties=(*_OF_DATA, "silos train, clip, round and add noise as instructed"),
        models=(NONE_OF_THEM,),
        sums=(*of_secure_sum(mechanism), _OWN_RECORDS),
        published=(SECURE_SUM, "silos do not collude with the server"),
        share="least answers",
        on_sums=", colluders' noise not counted",
        on_uploads=", should all masks fall",
    )


def batching_assumption(apart: Mapping[int, bool]) -> str:
    """Return the assumption about users whom a silo trains together in one batch.

    Parameters
    ----------
    apart : Mapping[int, bool]
        For each silo, its own answer: True if it trains its users one by one.
    """
    together = [str(silo) for silo, alone in apart.items() if not alone]
    if not together:
        return "users train one by one" if apart else ""
    where = "all silos" if len(together) == len(apart) else f"silos {', '.join(together)}"
    others = "" if len(together) == len(apart) else "; in the other silos they train one by one"
    return (
        f"users train in batches in {where}, where a plug-in promises that no bit of a user's "
        "model depends on other users, or a trial with random users on the silo's machine found no "
        f"such bit (evidence, not proof){others}"
    )


def exposures(mechanism: NoisedSum, run: RunSummary) -> tuple[float, float]:
    """Return how often the most exposed user was released: in sums, and in single uploads.

    The numbers count releases with the user's whole weight; see `Participations`. If silos send
    uploads without masks, both numbers are the larger of the two.
    """
    in_sums = run.participations.in_sums
    in_uploads = float(max(run.participations.uploads.values(), default=0))
    if not isinstance(mechanism, MaskedNoisedSum):
        # The adversary also saw refused uploads, and sums with too little noise count more.
        return max(in_sums, in_uploads), max(in_sums, in_uploads)
    if run.method.weighting == "equal":  # collusion costs nothing (see the top of this module)
        in_sums *= mechanism.honest_noise
    return in_sums, in_uploads
