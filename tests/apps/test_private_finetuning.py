"""Fine-tuning of a pretrained model for pictures and text: every method, and refused settings."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.numpy import load_file

from flower_ext.data import DataNotFound
from flower_ext.federation import run_in_process
from flower_ext.privacy import PrivacyUnit
from flower_ext.runs import RunDirectory
from flower_ext.training import check_shareable
from tests.support.apps import PRIVATE_FINETUNING
from tests.support.grids import grid
from tests.support.pretrained import finetuning_settings

METHODS = (
    "dp2-fedsam",
    "centaur",
    "dp-fedavg",
    "dp-fedavg-ft",
    "dp-fedsam",
    "dp-fedsam-ft",
    "uldp-avg-w",
    "fedavg",
    "p-fedsam",
    "own-head",
)
WITHOUT_PRIVACY = ("fedavg", "p-fedsam", "own-head")
PERSONAL_HEAD = ("dp2-fedsam", "centaur", "p-fedsam", "own-head")
LEARNING = {
    "rounds": 4,
    "local-epochs": 8,
    "head-epochs": 8,
    "batch-size": 8,
    "learning-rate": 0.2,
    "head-learning-rate": 0.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder of features that the tests of this module share."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture
def text(tmp_path):
    return finetuning_settings(tmp_path)


def config(path, **overrides):
    return {**PRIVATE_FINETUNING.small_config(run_directory=str(path)), **overrides}


def run(path, **overrides):
    server, client = PRIVATE_FINETUNING.parts()
    settings = config(path, **overrides)
    run_in_process(server, client, num_clients=settings["clients"], run_config=settings)
    return RunDirectory.open(path)


def module(name):
    PRIVATE_FINETUNING.parts()  # makes the app importable
    return import_module(f"private_finetuning_app.{name}")


def task(**overrides):
    settings = config("nowhere", **overrides)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings)
    return module("task").task_of(context)


@pytest.mark.report
@pytest.mark.parametrize("method", grid(METHODS, lambda method: method == "dp2-fedsam"))
def test_every_method_trains_an_adapter_on_features_of_pictures(method, folder, tmp_path):
    run_ = run(tmp_path / "run", method=method, **{"features-folder": str(folder)})
    assert run_.status == "completed"
    assert (run_.path / "report.html").exists()
    assert [row["answered"] for row in run_.metrics()] == [3, 3]
    guarantees = run_.guarantees()
    assert bool(guarantees) == (method not in WITHOUT_PRIVACY)
    unit = PrivacyUnit.USER if method == "uldp-avg-w" else PrivacyUnit.CLIENT
    assert all(g.unit is unit for g in guarantees)
    shared = load_file(run_.path / "model.safetensors")
    names = {"extractor.down", "extractor.up", "head"}
    if method in PERSONAL_HEAD:
        names -= {"head"}
    assert {name.rpartition(".")[0] for name in shared} == names


def test_the_control_shares_what_it_began_with(folder, tmp_path):
    settings = {"method": "own-head", "features-folder": str(folder)}
    shared = load_file(run(tmp_path / "run", **settings).path / "model.safetensors")
    start = task(**settings).initial_params(1)
    assert all((start[name].numpy() == value).all() for name, value in shared.items())


def test_a_head_on_pretrained_features_learns(folder, tmp_path):
    settings = {"method": "fedavg", "tune": "head", "features-folder": str(folder), **LEARNING}
    rows = run(tmp_path / "run", **settings).metrics()
    assert rows[-1]["accuracy_mean"] > 0.5  # ten digits, with 36 examples per client


@pytest.mark.full
def test_all_of_the_backbone_trains(tmp_path):
    settings = {"tune": "all", "examples": 40, "rounds": 1}
    shared = load_file(run(tmp_path / "run", **settings).path / "model.safetensors")
    start = task(**settings).initial_params(1)
    assert len(shared) > 100
    assert sum(not (start[name].numpy() == value).all() for name, value in shared.items()) > 100


def test_the_trained_backbone_starts_as_the_frozen_one_without_statistics():
    whole, frozen = task(tune="all").model(), task(tune="head").data
    check_shareable(whole)
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    expected = frozen.front().eval()(x)
    torch.testing.assert_close(whole.train().extractor(x), expected, rtol=1e-3, atol=1e-3)


def test_an_adapter_begins_as_the_identity():
    model = task().model()
    x = torch.rand(2, model.head.in_features)
    assert torch.equal(model.extractor(x), x)


@pytest.mark.full
def test_upcycling_halves_what_is_released(folder, tmp_path):
    settings = {"upcycled": True, "rounds": 4, "features-folder": str(folder)}
    run_ = run(tmp_path / "run", **settings)
    assert [entry["kind"] for entry in run_.ledger()] == ["reserve", "commit"] * 2
    assert run_.status == "completed"


@pytest.mark.full
def test_lora_on_text_trains_b_and_a_head_and_learns(text, tmp_path):
    run_ = run(tmp_path / "run", **{**text, "method": "fedavg", **LEARNING})
    shared = load_file(run_.path / "model.safetensors")
    low_rank = {name: value for name, value in shared.items() if ".lora_B." in name}
    assert set(shared) - set(low_rank) == {"head.weight", "head.bias"}
    assert low_rank
    assert any(value.any() for value in low_rank.values())  # it begins at zero
    assert run_.metrics()[-1]["accuracy_mean"] > 0.8


def test_an_odd_label_changes_no_model_and_no_other_text(text, tmp_path):
    odd = tmp_path / "odd.csv"
    odd.write_text(Path(text["text-file"]).read_text() + "the film,unheard-of\n")
    source, other = (
        module("texts").Texts.of(
            module("settings").Settings.of(config("x", **{**text, "text-file": str(path)}))
        )
        for path in (text["text-file"], odd)
    )
    assert other.num_classes == source.num_classes == 2
    assert other.pool().targets.equal(source.pool().targets)
    with pytest.raises(ValueError, match="none of its labels is one of yes, no"):
        replace(source, labels=("yes", "no")).pool()


@pytest.mark.full
@pytest.mark.parametrize("method", ["dp2-fedsam", "uldp-avg-w"])
def test_lora_on_text_is_shared_with_privacy(method, text, tmp_path):
    run_ = run(tmp_path / "run", **{**text, "method": method})
    names = set(load_file(run_.path / "model.safetensors"))
    assert any(".lora_B." in name for name in names)
    assert ("head.weight" in names) == (method == "uldp-avg-w")
    assert run_.guarantees()


def test_a_frozen_lora_a_is_equal_on_all_nodes(text):
    first, other = (task(**text, seed=seed) for seed in (1, 2))
    names = [name for name in first.factory.facts.frozen if ".lora_A." in name]
    assert names
    # A second process, which knows nothing of the first.
    fresh = first.factory.function
    torch.manual_seed(5)
    again = type(first.factory)(fresh)
    assert again.fingerprint == first.fingerprint == other.fingerprint
    both = task(**{**text, "lora-only-b": False})
    assert any(".lora_A." in name for name in both.shapes)


@pytest.mark.full
@pytest.mark.parametrize("tune", ["head", "all"])
def test_text_trains_a_head_or_everything(tune, text, tmp_path):
    settings = {**text, "method": "fedavg", "tune": tune, **LEARNING}
    assert run(tmp_path / "run", **settings).metrics()[-1]["accuracy_mean"] > 0.8


@pytest.mark.parametrize("method", PERSONAL_HEAD)
def test_a_personal_head_alone_leaves_nothing_to_share(method, tmp_path):
    with pytest.raises(ValueError, match=f"tune='head' with method='{method}'.*tune='adapter'"):
        run(tmp_path / "run", method=method, tune="head")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "fedsam2"}, "method='fedsam2': expected one of"),
        ({"tune": "body"}, "tune='body': expected one of head, adapter, all"),
        ({"dataset": "imagenet"}, "dataset='imagenet': expected one of cifar10"),
        ({"backbone": "vgg"}, "backbone='vgg': expected efficientnet-lite0, or torchvision:NAME"),
        ({"weights": "/nowhere.pth"}, "weights='/nowhere.pth': expected a state_dict"),
        ({"sam-radius": 0.0}, "sam-radius=0.0 with method='dp2-fedsam'"),
        ({"features-folder": "here"}, "features-folder='here': expected an absolute path"),
        ({"dataset": "text"}, "text-file='': expected the absolute path of a CSV file"),
        ({"dataset": "text", "text-file": "/x.csv"}, "text-labels='': expected at least two"),
        (
            {"dataset": "text", "text-file": "/x.csv", "text-labels": "a,b"},
            "text-model='': expected the absolute path",
        ),
    ],
)
def test_bad_settings_end_the_run_with_the_name_of_the_setting(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **overrides)


def test_missing_data_say_how_to_get_them(tmp_path, monkeypatch, text):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(DataNotFound, match=r"cifar10\.npz"):
        run(tmp_path / "run", dataset="cifar10", **{"data-folder": str(tmp_path)})
    with pytest.raises(DataNotFound, match="text-file.*name a CSV file"):
        run(tmp_path / "run", **{**text, "text-file": str(tmp_path / "other.csv")})
    with pytest.raises(ValueError, match="If you are offline, name a local folder"):
        run(tmp_path / "run", **{**text, "text-model": str(tmp_path / "model0")})
    (tmp_path / "odd.csv").write_text("words,label\na,b\n")
    with pytest.raises(ValueError, match=r"columns text and label.*found \['label', 'words'\]"):
        run(tmp_path / "run", **{**text, "text-file": str(tmp_path / "odd.csv")})


@pytest.mark.parametrize(
    ("absent", "backbone", "message"),
    [
        (
            "efficientnet_lite_pytorch",
            "efficientnet-lite0",
            r"pip install 'flower-ext-pretrained\[images\]', or './plugins/pretrained\[images\]'",
        ),
        ("torchvision.models", "torchvision:resnet18", "pip install torchvision"),
    ],
)
def test_a_missing_image_library_is_named(absent, backbone, message, monkeypatch):
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ValueError, match=message):
        module("backbones").Backbone(backbone, dataset="digits", image_size=32)


def test_only_text_needs_the_libraries_of_hugging_face(text, folder, tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.startswith(("private_finetuning_app", "flower_ext_pretrained")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    pictures = {"tune": "head", "method": "fedavg", "features-folder": str(folder)}
    assert run(tmp_path / "run", **pictures).status == "completed"
    with pytest.raises(ValueError, match=r"transformers .* 'flower-ext-pretrained\[text\]'"):
        run(tmp_path / "text", **text)
