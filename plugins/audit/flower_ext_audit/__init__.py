"""Audits: run a strategy with and without one unit's data, and bound its ε from below."""

from flower_ext_audit.experiment import Experiment, Observation, World, projected
from flower_ext_audit.harness import Audit, ViewAudit, audit, audit_in_one_run
from flower_ext_audit.lower_bounds import BoundTerms, LowerBound, by_rates, if_gaussian
from flower_ext_audit.observing import observe
from flower_ext_audit.one_run import (
    gaussian_curve,
    in_one_run,
    in_one_run_by_curve,
    profile_curve,
)
from flower_ext_audit.secure_rounds import SecureTranscript

__all__ = [
    "Audit",
    "BoundTerms",
    "Experiment",
    "LowerBound",
    "Observation",
    "SecureTranscript",
    "ViewAudit",
    "World",
    "audit",
    "audit_in_one_run",
    "by_rates",
    "gaussian_curve",
    "if_gaussian",
    "in_one_run",
    "in_one_run_by_curve",
    "observe",
    "profile_curve",
    "projected",
]
