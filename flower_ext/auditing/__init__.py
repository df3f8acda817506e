"""Audits: a strategy run in two worlds, and what an attack proves about its ε."""

from flower_ext.auditing.harness import (
    Audit,
    Experiment,
    Observation,
    ViewAudit,
    World,
    audit,
    observe,
    projected,
)
from flower_ext.auditing.one_run import audit_in_one_run

__all__ = [
    "Audit",
    "Experiment",
    "Observation",
    "ViewAudit",
    "World",
    "audit",
    "audit_in_one_run",
    "observe",
    "projected",
]
