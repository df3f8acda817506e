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

__all__ = [
    "Audit",
    "Experiment",
    "Observation",
    "ViewAudit",
    "World",
    "audit",
    "observe",
    "projected",
]
