"""Assumptions about silos with users in common, and what a secure sum of their uploads is worth.

The members of a secure sum are the n silos, all of them in every round. At least m answer, and
each adds a discrete Gaussian share worth σ²C²/m. Let c silos collude with the server. They take off
their own shares, and their users' parts with them.

* Weights by records: a user may lie in the other silos with all its weight, so that it moves the
  rest by C. The rest has at least m − c shares: noise multiplier σ√((m − c)/m).
* Equal weights: a user moves what h' other silos send by C h'/n, under noise σC √(h'/m). That is a
  noise multiplier of σ n/√(m h') ≥ σ: collusion costs nothing.
* NAIVE: a user moves what h' silos send by 2C h', under noise σC n √(h'/m): a noise multiplier of
  (σ/2) n/√(m h') ≥ σ/2, again whoever colludes.

Poisson sampling of users is sound with secure sums, unlike that of clients: how many silos are
asked, how many shares a sum has, and each share's size follow from n and m alone, so that the noise
does not show how many users were drawn. The server draws the users and tells the silos, so that
nothing is amplified against a server that sees sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from flower_ext.errors import InvalidValue
from flower_ext.privacy.assumptions import DISCRETE, NOT_PROVIDED, ON_A_GRID
from flower_ext.privacy.assumptions import SECURE_SUM as PROTOCOL
from flower_ext.privacy.client_level import of_secure_sum
from flower_ext.privacy.guarantee import Guarantee
from flower_ext.privacy.noised_sum import NoisedSum
from flower_ext.privacy.units import NeighboringRelation, PrivacyUnit

PlanT = TypeVar("PlanT", bound=NoisedSum)

_OF_DATA = (
    "the numbers of users, silos and rounds are public",
    "users have the same id in every silo",
    "no user's records keep a silo from loading its data (Task.data)",
)
OF_SILOS = (
    *_OF_DATA,
    "silos train, clip and add noise as told, and do not collude",
    ON_A_GRID,
)
OF_SILOS_IN_CELLS = (*_OF_DATA, "silos train, clip, round and add noise as told", DISCRETE)
"""The assumptions about silos whose uploads are whole numbers, for a secure sum."""
_OWN_RECORDS = "of a user's records those count that no colluding silo holds"
of_one_user = partial(
    Guarantee, unit=PrivacyUnit.USER, relation=NeighboringRelation.ADD_OR_REMOVE_ONE
)
SECURE_SUM = f"secure aggregation, {NOT_PROVIDED}: the server sees no silo's upload"
"""Assumption of what is said about sums, where silos send their uploads as they are."""


def among_silos(plan: PlanT, num_silos: int) -> PlanT:
    """Return the plan of users in so many silos, whose uploads a secure sum adds up.

    Raises
    ------
    InvalidValue
        So many silos have no secure sum with these parameters, or the plan names another number.
    """
    if plan.silos not in (None, num_silos):
        raise InvalidValue(f"silos={plan.silos!r} of the plan: expected num_silos={num_silos}")
    return plan if plan.secure_aggregation is None else replace(plan, silos=num_silos)


def shield_of(plan: NoisedSum | None) -> tuple[str, ...]:
    """Return the assumptions about the secure sum of a plan's silos; none where it has none."""
    if plan is None or plan.secure_aggregation is None:
        return ()
    return (*of_secure_sum(plan, plan.secure_aggregation), _OWN_RECORDS)


def published_shield(plan: NoisedSum | None) -> tuple[str, ...]:
    """Return the assumptions of a theorem about sums that counts all silos' noise."""
    if plan is None or plan.secure_aggregation is None:
        return (SECURE_SUM,)
    return (PROTOCOL, "silos do not collude with the server")


def company_assumption(apart: Mapping[int, bool]) -> str:
    """Return the assumption about users who train in one batch, from the silos' answers.

    Parameters
    ----------
    apart : Mapping[int, bool]
        By silo: True where users train one by one.
    """
    together = [str(silo) for silo, alone in apart.items() if not alone]
    if not together:
        return "users train one by one" if apart else ""
    where = "all silos" if len(together) == len(apart) else f"silos {', '.join(together)}"
    others = "" if len(together) == len(apart) else "; in the other silos they train one by one"
    return (
        f"users train in batches in {where}, in compiled code or where a trial with random users "
        "on the silo's machine found no bit of a model that depends on the others (evidence, not "
        f"proof){others}"
    )


def exposures(
    plan: NoisedSum,
    rounds: int,
    weighting: str,
    in_sums: float | None,
    in_uploads: float | None,
) -> tuple[float, float]:
    """Return the most exposed user's weight in sums, and in uploads that are seen."""
    sums = float(rounds if in_sums is None else in_sums)
    uploads = sums if in_uploads is None else float(in_uploads)
    if plan.secure_aggregation is None:
        return sums, uploads
    found = plan.sum_parameters
    honest = found.honest_answers / found.least_answers
    if in_sums is None:
        sums, uploads = sums / honest, float(rounds) if in_uploads is None else uploads
    # With equal weights collusion costs nothing (see the top of this module).
    return (sums * honest if weighting == "equal" else sums), uploads
