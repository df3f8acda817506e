"""The language-model app on SuperLink and two SuperNodes, each with its own folder of texts."""

import json

import pytest

from tests.faults.processes import WatchedRun
from tests.support.apps import PRIVATE_LM
from tests.support.deployment import Deployment
from tests.support.pretrained import save_causal

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_two_sites_with_different_texts_train_an_adapter_that_generates(tmp_path):
    for node in range(2):
        (folder := tmp_path / f"site{node}").mkdir()
        rows = [{"prompt": f"{n}*{node}=", "completion": str(n * node)} for n in range(12)]
        (folder / "products.jsonl").write_text("\n".join(map(json.dumps, rows)))
    base = save_causal(tmp_path / "base")
    settings = {
        **PRIVATE_LM.small,
        "clients": 2,
        "dataset": "folder",
        "base": base,
        "connect-timeout": 600,
    }
    sites = {"data-folder": f"{tmp_path}/site{{node}}"}
    with Deployment(tmp_path / "flower", nodes=2, node_config=sites) as deployment:
        watched = WatchedRun(deployment, PRIVATE_LM.folder, tmp_path / "run", settings)
        run = watched.finish(1500)
        assert watched.error is None, deployment.logs()
    assert run.status == "completed"
    assert [row["answered"] for row in run.metrics()] == [2, 2]
    export = PRIVATE_LM.module("export")
    export.export(run.path, tmp_path / "adapter")
    model = export.load_exported(tmp_path / "adapter")
    assert any(w.any() for name, w in model.named_parameters() if ".lora_B." in name)
