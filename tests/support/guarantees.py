"""Guarantees of a run, and look-ups by their basis and view."""

from dataclasses import replace

from tests.support.run_summary import METHOD, run_summary


def client_level(plan, participations, *, memory=False, **facts):
    """Return the guarantees of ``plan`` for clients with these participations."""
    method = replace(METHOD, keeps_memory=memory)
    return plan.guarantees(run_summary(method=method, participations=participations, **facts))


def by_view(plan, participations, **facts):
    return {g.view: g for g in client_level(plan, participations, **facts)}


def by_basis(guarantees):
    published, provable = guarantees
    assert (published.basis, provable.basis) == ("published", "provable")
    return published, provable
