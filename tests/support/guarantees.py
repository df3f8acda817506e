"""Look up guarantees of a run by their basis and view."""

from flower_ext.privacy.theorems.client_level import client_level_guarantees


def by_view(plan, participations, **how):
    return {g.view: g for g in client_level_guarantees(plan, participations, **how)}


def by_basis(guarantees):
    published, provable = guarantees
    assert (published.basis, provable.basis) == ("published", "provable")
    return published, provable
