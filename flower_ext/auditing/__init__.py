"""Audits: run a strategy with and without one unit's data, and bound its ε from below."""

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
