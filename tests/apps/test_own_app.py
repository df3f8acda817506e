"""An app of a user that reads its settings by `configured`, and the length of every such app."""

import pytest

from flower_ext.federation import run_in_process
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting
from tests.support.apps import APPS, OWN


def run(path, **settings):
    server, client = OWN.parts()
    config = {**OWN.config(), "run-directory": str(path), **settings}
    run_in_process(server, client, num_clients=config["clients"], run_config=config)
    return RunDirectory.open(path)


@pytest.mark.report
@pytest.mark.figures
def test_an_app_from_scratch_trains_privately_and_leaves_a_report(tmp_path):
    done = run(tmp_path / "run", sampling="everyone")  # whose noise takes no seconds to find
    assert done.status == "completed"
    assert len(done.metrics()) == 4
    provable = [each for each in done.guarantees() if each.basis == "provable"]
    assert min(each.epsilon for each in provable) == pytest.approx(4.0, rel=1e-2)
    assert {each.delta for each in provable} == {0.05}
    assert (done.path / "report.html").is_file()


@pytest.mark.parametrize("name", ["clipping-norm", "sampling", "learning-rate"])
def test_a_setting_an_app_lacks_is_named_with_where_to_add_it(name, tmp_path):
    server, client = OWN.parts()
    config = {key: value for key, value in OWN.config().items() if key != name}
    message = rf"run-config has no {name}: expected .*; add it to \[tool.flwr.app.config\]"
    with pytest.raises(UnfitSetting, match=message):
        run_in_process(
            server,
            client,
            num_clients=8,
            run_config={**config, "run-directory": str(tmp_path / "run")},
        )


@pytest.mark.parametrize(
    "path", sorted(APPS.glob("*/*/server_app.py")), ids=lambda path: path.parent.name
)
def test_a_server_app_is_settings_and_wiring(path):
    assert len(path.read_text().splitlines()) <= 120
