"""What a client's process loads before it can answer: on SuperLink it does so for every message."""

import json
import subprocess
import sys

import pytest

from tests.support.apps import DP2_FEDSAM, DP_DITTO, ULDP_FL, UPCYCLED_FL

NEEDLESS = ["dp_accounting", "matplotlib", "numba", "opacus", "pandas", "ray", "scipy", "sklearn"]


@pytest.mark.parametrize(
    "app", [DP2_FEDSAM, DP_DITTO, ULDP_FL, UPCYCLED_FL], ids=lambda app: app.folder.name
)
def test_a_client_app_loads_nothing_that_only_the_server_or_a_report_needs(app):
    script = (
        f"import json, sys, {app.folder.name}_app.client_app; print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=app.folder, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "flower_ext" in loaded
    assert not loaded & set(NEEDLESS)
