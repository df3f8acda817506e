"""A user's project of 80 lines: a pretrained text classifier with adapters, in one process."""

from collections import Counter
from dataclasses import replace

import pytest
from flwr.app import Context
from safetensors.numpy import load_file

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederationNotReady, client_app, run_in_process
from flower_ext.runs import RunDirectory
from flower_ext.training import Task
from tests.support.apps import TEXTS
from tests.support.pretrained import project_settings, save_pretrained


def run(path, settings, **changes):
    server, client = TEXTS.parts()
    config = {**TEXTS.config(), **settings, "run-directory": str(path), **changes}
    run_in_process(server, client, num_clients=config["clients"], run_config=config)
    return RunDirectory.open(path)


def test_the_project_is_short():
    assert sum(len(path.read_text().splitlines()) for path in TEXTS.folder.glob("*/*.py")) <= 95


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(False, id="shared head", marks=pytest.mark.full),
        pytest.param(True, id="personal head"),
    ],
)
def test_adapters_are_all_that_is_shared_beside_the_head(head, tmp_path):
    done = run(tmp_path / "run", project_settings(tmp_path), **{"personal-head": head})
    assert done.status == "completed"
    names = [*load_file(done.path / "model.safetensors")]
    kinds = Counter("lora" if "lora_" in name else "head" for name in names)
    # One layer with adapters of queries and values, of two matrices each.
    assert kinds == ({"lora": 4} if head else {"lora": 4, "head": 2})
    epsilons = {g.epsilon for g in done.guarantees() if g.basis == "provable"}
    assert min(epsilons) == pytest.approx(8.0, rel=1e-2)


def test_nodes_with_another_pretrained_model_are_refused_before_the_first_round(tmp_path):
    settings = project_settings(tmp_path)
    other = {**settings, "base": str(save_pretrained(tmp_path / "other", seed=1))}
    server, _ = TEXTS.parts()
    from texts.task import task_of

    def elsewhere(context: Context) -> Task:
        return task_of(replace(context, run_config={**context.run_config, **other}))

    with pytest.raises(FederationNotReady, match="same base model"):
        run_in_process(
            server,
            client_app(DPFedAvg.client, task=elsewhere),
            num_clients=3,
            run_config={**TEXTS.config(), **settings, "run-directory": str(tmp_path / "run")},
        )
    assert RunDirectory.open(tmp_path / "run").metrics() == []
