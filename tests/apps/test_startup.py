"""A client's process imports no needless module, because it starts anew for every message."""

import json
import subprocess
import sys

from tests.support.apps import DP2_FEDSAM, DP_DITTO, ULDP_FL, UPCYCLED_FL

NEEDLESS = [
    *("dp_accounting", "markdown_it", "matplotlib", "numba", "opacus", "pandas", "randomgen"),
    *("ray", "scipy", "sklearn", "sqlalchemy", "sympy", "torch._dynamo", "torchvision"),
    "flower_ext_audit",
]


def test_no_client_app_loads_what_only_the_server_or_a_report_needs():
    apps = (DP2_FEDSAM, DP_DITTO, ULDP_FL, UPCYCLED_FL)
    script = f"""
import json, sys
from flower_ext.data import load
load("digits")
for folder, name in {[(str(app.folder), app.package) for app in apps]}:
    sys.path.insert(0, folder)
    __import__(f"{{name}}.client_app")
    print(json.dumps([name, *sys.modules]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    for line in done.stdout.splitlines():
        app, *modules = json.loads(line)
        loaded = set(modules)
        assert {"flower_ext", app} <= loaded
        assert (app, loaded & set(NEEDLESS)) == (app, set())
    assert len(done.stdout.splitlines()) == len(apps)
