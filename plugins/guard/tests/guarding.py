"""Policies for tests of the guard."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flower_ext_guard.confinement import UNSHARE

CLIPPING_NORM, NOISE_MULTIPLIER = 1.0, 0.5
CONSTANTS = {"num-examples": 1, "train_loss": 0.0}

_POLICY = """
apps = {apps}
timeout = {timeout}
answer-limit = 4_000_000
isolation = "{isolation}"
{more}

[budget]
epsilon = {epsilon}
delta = 1e-6

[messages.train]
release = "clipped-noised-update"
clipping-norm = 1.0
noise-multiplier = 0.5
constants = {{ num-examples = 1, train_loss = 0.0 }}

[messages.evaluate]
release = "constants"
constants = {{ num-examples = 1, eval_loss = 0.0 }}
"""


def write_policy(
    path: Path,
    *,
    apps: str = '"any"',
    timeout: float = 60,
    isolation: str = "namespaces",
    epsilon: float = 1000.0,
    more: str = "",
) -> Path:
    """Write a policy, and return its path."""
    content = _POLICY.format(
        apps=apps, timeout=timeout, isolation=isolation, epsilon=epsilon, more=more
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


_SUM_POLICY = """
apps = "any"
timeout = 60
isolation = "{isolation}"

[budget]
epsilon = {epsilon}
delta = 1e-6

[messages.train]
release = "secure-sum-contribution"
noise-multiplier = {noise_multiplier}

[sum]
identity-key = "{identity_key}"
members = "{members}"
colluders = {colluders}
honest-answers = {honest_answers}
"""


def write_sum_policy(
    path: Path,
    identity: dict[str, str],
    *,
    isolation: str = "namespaces",
    epsilon: float = 1000.0,
    noise_multiplier: float = 0.5,
    colluders: int = 0,
    honest_answers: int = 3,
) -> Path:
    """Write a policy that permits nothing but contributions to sums, and return its path."""
    content = _SUM_POLICY.format(
        isolation=isolation,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        identity_key=identity["sum-identity-key"],
        members=identity["sum-members"],
        colluders=colluders,
        honest_answers=honest_answers,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def _isolates() -> bool:
    if not shutil.which("unshare"):
        return False
    done = subprocess.run([*UNSHARE, "true"], capture_output=True, check=False)
    return done.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _isolates() and "CI" not in os.environ,
    reason="this kernel gives no namespaces to unprivileged processes",
)
