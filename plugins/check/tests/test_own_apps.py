"""Every app of this package is confirmed, in each placement of its noise, and its faults are found.

A wrong contradiction is as bad as a missed fault: whoever reads it stops to believe the check.
"""

import shutil
from dataclasses import dataclass, field
from typing import Any

import pytest
from checking import codes, result_of

from tests.support import apps


@dataclass(frozen=True, kw_only=True)
class Case:
    """An app, with settings that make its check short and keep its mechanism."""

    app: apps.App
    clients: int
    settings: dict[str, Any] = field(default_factory=dict)

    def check(self, scratch, folder=None):
        """Return the answer of the check of the app, or of a changed copy of its folder."""
        return result_of(
            folder or self.app.folder, scratch, clients=self.clients, settings=self.settings
        )


SECURE = {"aggregation": "secure", "sampling": "fixed-size"}
SERVER = {"noise-placement": "server"}
ADAM = {"server-optimizer": "adam", "server-learning-rate": 0.1, "server-tau": 0.1}


def _of(app: apps.App, clients: int, **groups: dict[str, Any]) -> dict[str, Case]:
    """Return cases of an app by name, each with its settings."""
    return {
        f"{app.folder.name}, {name.replace('_', ' ')}": Case(
            app=app, clients=clients, settings=settings
        )
        for name, settings in groups.items()
    }


DEMO = {"clients": 200, "sampling-rate": 0.2}
PICTURES = {
    name: apps.PRIVATE_FINETUNING.small[name]
    for name in ("dataset", "examples", "image-size", "adapter-width", "partition")
}
# At a smaller rate, a draw of so few clients would often ask nobody, or one client alone.
FEW = {"clients": 12, "sampling-rate": 0.9}
LM = {"clients": 12, "texts-per-client": 8, "max-tokens": 16}
CASES = {
    **_of(apps.DEMO, 200, client={**DEMO, "noise-placement": "client"}, server=DEMO),
    **_of(
        apps.CONSORTIUM,
        5,
        training={},
        statistics={"method": "statistics"},
        drawn_users={"user-sampling-rate": 0.3},
        plain_sums={"aggregation": "plain"},
    ),
    **_of(apps.DP_DITTO, 20, steps={}, upload={"noise": "upload"}),
    **_of(
        apps.DP2_FEDSAM,
        50,
        client={},
        server={**SERVER, **ADAM, "clipping": "adaptive"},
        secure_sums=SECURE,
        correlated_noise={**SERVER, "noise": "correlated"},
        secure_scores={**SECURE, **ADAM, "evaluation": "secure"},
    ),
    **_of(apps.PRIVATE_FINETUNING, 12, client={**PICTURES, **FEW}),
    **_of(
        apps.PRIVATE_LM,
        12,
        client=LM,
        server={**LM, **SERVER},
        secure_sums={**LM, **SECURE},
        authors={**LM, "method": "uldp-avg-w", "num-users": 20},
    ),
    **_of(
        apps.ULDP_FL,
        5,
        plain={},
        secure_sums={"aggregation": "secure"},
        naive={"method": "uldp-naive"},
        encrypted={"method": "uldp-avg-private", "protocol": "lattice", "num-users": 10},
        adaptive={"clipping": "adaptive"},
    ),
    **_of(apps.UPCYCLED_FL, 30, output={}),
}
"""Apps and placements of their noise."""
UNMEASURED = {
    **_of(apps.ULDP_FL, 5, group={"method": "uldp-group"}),
    **_of(apps.UPCYCLED_FL, 30, objective={"perturbation": "objective"}),
}
"""Cases whose noise no message shows by itself."""


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_an_app_of_this_package_is_confirmed_by_measurement(name, tmp_path):
    result = CASES[name].check(tmp_path)
    assert "error" not in result
    assert not result["unproven"], result["findings"]
    assert codes(result) == set()
    second = result["measured"]
    assert second is not None, result["unmeasured"]
    assert second["agrees"]
    assert second["high"] < 10 * second["stated"]  # a looser bound would find no fault


@pytest.mark.full
@pytest.mark.parametrize("name", UNMEASURED)
def test_an_app_whose_noise_cannot_be_seen_says_why(name, tmp_path):
    result = UNMEASURED[name].check(tmp_path)
    assert not result["unproven"], result["findings"]
    assert result["measured"] is None
    assert "no message shows it alone" in result["unmeasured"]


FAULTS = {
    "no noise": """
from flower_ext.privacy import NoiseSource
NoiseSource.add_gaussian = lambda self, value, stddev, **options: dict(value)
NoiseSource.add_discrete_gaussian = lambda self, cells, stddev: dict(cells)
""",
    "a tenth of the noise": """
from flower_ext.privacy import NoiseSource
def tenth(add):
    return lambda self, value, stddev, **options: add(self, value, stddev / 10, **options)
NoiseSource.add_gaussian = tenth(NoiseSource.add_gaussian)
NoiseSource.add_discrete_gaussian = tenth(NoiseSource.add_discrete_gaussian)
""",
    "no clip": """
from dataclasses import replace
from flower_ext.privacy.mechanisms import adaptive_clipping, protections
in_cells = protections.in_cells
def loose(bounded, at):
    def bounded_loosely(*arguments):
        changed = [*arguments]
        changed[at] *= 100
        return replace(bounded(*changed), bound=arguments[at])
    return bounded_loosely
adaptive_clipping.clip = protections.clip = loose(protections.clip, 1)
each = adaptive_clipping.clip_each_row
adaptive_clipping.clip_each_row = lambda rows, norm: each(rows, 100 * norm)
protections.in_cells = lambda update, norm, cell: in_cells(update, 100 * norm, cell)
protections.sum_clipped_rows = loose(protections.sum_clipped_rows, 1)
protections.sum_rows_in_cells = loose(protections.sum_rows_in_cells, 1)
from flower_ext.training.dp import dp_sgd
clipped_gradient = dp_sgd.ClippedGradient
dp_sgd.ClippedGradient = lambda *arguments, clipping_norm, **options: clipped_gradient(
    *arguments, clipping_norm=100 * clipping_norm, **options
)
""",
}
"""Changes of this package, which an app makes when its client side is imported."""
FOUND_BY = {
    "no noise": {"noise-missing", "seeded-noise"},
    "a tenth of the noise": {"noise-small", "epsilon"},
    "no clip": {"unclipped", "epsilon"},
}
FAULTY = [
    "consortium, training",
    "consortium, plain sums",
    "dp-ditto, steps",
    "dp2-fedsam, secure sums",
    "private-lm, client",
    "private-lm, authors",
]


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_in_an_app_of_this_package_is_found(name, fault, tmp_path):
    case = CASES[name]
    folder = tmp_path / "changed"
    shutil.copytree(case.app.folder, folder)
    client = folder / case.app.package / "client_app.py"
    client.write_text(client.read_text() + FAULTS[fault])
    result = case.check(tmp_path / "scratch", folder)
    assert result["unproven"]
    assert codes(result) & FOUND_BY[fault]
