"""Audits: run a strategy in two worlds, and bound its ε from below by an attack."""

from flower_ext.auditing.experiment import Experiment, Observation, World, projected
from flower_ext.auditing.harness import Audit, ViewAudit, audit, audit_in_one_run
from flower_ext.auditing.observing import observe
from flower_ext.auditing.secure_rounds import SecureTranscript

__all__ = [
    "Audit",
    "Experiment",
    "Observation",
    "SecureTranscript",
    "ViewAudit",
    "World",
    "audit",
    "audit_in_one_run",
    "observe",
    "projected",
]
