"""Private fine-tuning of a causal language model: runs, dead models, odd texts, and the export."""

import json
import logging

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from safetensors.numpy import load_file
from safetensors.torch import load_file as tensors
from safetensors.torch import save_file

from flower_ext.algorithms import DPFedAvg
from flower_ext.data import DataNotFound
from flower_ext.federation import InProcessGrid, run_in_process
from flower_ext.federation.messages import records
from flower_ext.privacy import FullParticipation, PrivacyUnit, ReleasePlan
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining
from flower_ext_pretrained.next_token import IGNORED
from tests.support.apps import PRIVATE_LM
from tests.support.grids import grid
from tests.support.pretrained import save_causal
from tests.support.strategies import strategy_of

METHODS = ("dp-fedavg", "uldp-avg-w", "fedavg", "alone")
WITHOUT_PRIVACY = ("fedavg", "alone")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_causal(tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture
def texts(tmp_path):
    """Return a folder with records and running text of three clients."""
    for client in range(3):
        folder = tmp_path / "texts" / f"client{client}"
        folder.mkdir(parents=True)
        rows = [
            {"prompt": f"{n}+{client}=", "completion": str(n + client), "author": n}
            for n in range(8)
        ]
        (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "note.txt").write_text(f"I am client {client}. " * 3)
    return tmp_path / "texts"


def config(path="nowhere", **overrides):
    return {**PRIVATE_LM.small_config(run_directory=str(path)), **overrides}


def run(path, base, **overrides):
    server, client = PRIVATE_LM.parts()
    settings = config(path, base=base, **overrides)
    run_in_process(server, client, num_clients=settings["clients"], run_config=settings)
    return RunDirectory.open(path)


def task(base, **overrides):
    settings = config(base=base, **overrides)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings)
    return PRIVATE_LM.module("task").task_of(context)


def of_folder(folder, **overrides):
    return {"dataset": "folder", "data-folder": str(folder), **overrides}


@pytest.mark.parametrize("method", grid(METHODS, lambda method: method == "dp-fedavg"))
def test_every_method_shares_nothing_but_adapters(method, base, tmp_path):
    done = run(tmp_path / "run", base, method=method)
    assert done.status == "completed"
    assert all(".lora_B." in name for name in load_file(done.path / "model.safetensors"))
    guarantees = done.guarantees()
    assert bool(guarantees) == (method not in WITHOUT_PRIVACY)
    unit = PrivacyUnit.USER if method == "uldp-avg-w" else PrivacyUnit.CLIENT
    assert all(g.unit is unit for g in guarantees)
    assert {f"{name}_mean" for name in ("perplexity", "accuracy", "exact_match")} <= {
        *done.metrics()[-1]
    }


@pytest.mark.full
def test_a_secure_evaluation_releases_shares_of_tokens_and_texts_and_the_loss(base, tmp_path):
    secure = {"aggregation": "secure", "evaluation": "secure", "clients": 4}
    exact = {"colluding-share": 0.0, "dropout-share": 0.0, "seeded-noise": False}
    done = run(tmp_path / "run", base, **secure, **exact, epsilon=1e4)
    last = done.metrics()[-1]
    assert {"accuracy_mean", "exact_match_mean", "loss_mean"} <= {*last}
    assert "perplexity_mean" not in last


@pytest.mark.slow
def test_the_tiny_base_learns_and_is_made_once(tmp_path):
    tiny_base = PRIVATE_LM.module("base").tiny_base
    folder = tiny_base(tmp_path, steps=60)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_base(tmp_path, steps=60) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [*tmp_path.iterdir()] == [folder]
    trained = task(str(folder), clients=3, **{"texts-per-client": 64, "max-tokens": 64})
    model, labels = trained.model(), trained.data(0).test.targets
    with torch.no_grad():
        scores = model(trained.data(0).test.features["input_ids"], labels)
    assert trained.metrics["perplexity"](scores, labels) < 60  # of 259 bytes


def test_private_modules_are_not_public():
    text = PRIVATE_LM.module("python_text")
    public = text.public_text().splitlines()
    assert len(public) > 500
    functions = text.private_functions()
    assert len(functions) > 100
    assert all(code.startswith(("def ", "async def ")) for module in functions for code in module)
    both, (ours, theirs) = set(), text._modules()
    both.update(ours)
    assert not both & {*theirs}


def test_clients_of_the_standard_library_have_disjoint_functions(base):
    texts = {"texts-per-client": 8, "max-tokens": 64}
    data = [task(base, clients=400, **texts).data(client) for client in (0, 1, 350)]
    assert all(len(d.train) == 6 and len(d.test) == 2 for d in data)
    rows = {tuple(row.tolist()) for d in data for row in d.train.targets}
    assert len(rows) == 18
    with pytest.raises(ValueError, match="clients=20000 .*has functions for"):
        task(base, clients=20_000, **texts).data(0)


def test_authors_of_the_standard_library_write_and_are_tested_at_several_clients(base):
    authors = {"method": "uldp-avg-w", "num-users": 100, "texts-per-client": 4}
    data = [task(base, clients=40, **authors).data(client) for client in range(40)]
    assert all(len(d.train) == 3 * len(d.test) > 0 for d in data)
    places = [client for client, d in enumerate(data) if 0 in d.owners]
    assert len(places) > 1


def test_a_record_s_prompt_is_read_but_not_learnt(base, texts):
    data = task(base, **of_folder(texts)).data(2)
    rows = [
        (ids, labels)
        for part in (data.train, data.test)
        for ids, labels in zip(part.features["input_ids"], part.targets, strict=True)
    ]
    record = [ord(c) + 3 for c in "7+2=9"]
    ((ids, labels),) = [(i, w) for i, w in rows if i[:5].tolist() == record]
    assert labels[:6].tolist() == [IGNORED] * 4 + [record[4], 1]
    assert set(ids[6:].tolist()) == {0}
    assert set(labels[6:].tolist()) == {IGNORED}


def test_each_author_has_separate_texts(base, texts):
    for note in texts.glob("*/note.txt"):
        note.unlink()
    data = task(base, **of_folder(texts, method="uldp-avg-w", **{"num-users": 8})).data(0)
    assert len(data.owners) == len(data.train) == 8  # each author has one text, for training
    first = [int(ids[0]) - 3 - ord("0") for ids in data.train.features["input_ids"]]
    assert data.owners.tolist() == first


ODD = {
    "an author beyond the population": {"completion": "odd", "author": 8},
    "a negative author": {"completion": "odd", "author": -1},
    "an author by name": {"completion": "odd", "author": "Ann"},
    "an author by truth value": {"completion": "odd", "author": True},
    "no author": {"completion": "odd"},
    "no text": {"completion": 3, "author": 7},
    "no object": [],
    "many more texts of one author": None,
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_one_author_changes_no_other_author_s_examples(odd, base, texts):
    """Neither by odd lines nor by their number: no other text moves into or out of the tests."""

    def of_others():
        data = task(base, **of_folder(texts, method="uldp-avg-w", **{"num-users": 8})).data(0)
        rows = zip(data.owners.tolist(), data.train.targets.tolist(), strict=True)
        return sorted(row for row in rows if row[0] != 7)

    for note in texts.glob("*/note.txt"):
        note.unlink()
    before = of_others()
    line = {"completion": "more", "author": 7} if odd is None else odd
    (texts / "client0" / "odd.jsonl").write_text("\n".join([json.dumps(line)] * 13 + ["{"]))
    assert of_others() == before


def test_a_folder_without_sub_folders_belongs_to_its_machine_s_client(base, texts):
    whole = task(base, **of_folder(texts)).data(1)
    alone = task(base, **of_folder(texts / "client1")).data(1)
    assert alone.train.targets.equal(whole.train.targets)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1 is not a JSON"), ('{"prompt": "a"}', "line 1"), ('{"completion": 3}', "line 1")],
)
def test_a_line_that_is_no_record_is_refused_without_its_text(line, message, base, texts):
    (texts / "client0" / "odd.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message) as refused:
        task(base, **of_folder(texts)).data(0)
    assert line not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "fedsgd"}, "method='fedsgd': expected one of"),
        ({"lora-targets": "q_proj"}, "LoRA targets='q_proj': 'q_proj' names no linear layer"),
        ({"learning-rate": 1e30}, "learning-rate=1e\\+30: training on public text diverges"),
    ],
)
def test_bad_settings_end_the_run_with_the_name_of_the_setting(overrides, message, base, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", base, **overrides)
    assert not (tmp_path / "run").exists()


def test_missing_folders_are_named(base, texts):
    for folder in ("", "/nowhere"):
        with pytest.raises(DataNotFound, match=f"data-folder='{folder}' with dataset='folder'"):
            task(base, **of_folder(folder)).data(0)
    with pytest.raises(ValueError, match="clients=5: expected 5 sub-folders"):
        task(base, **of_folder(texts, clients=5)).data(0)


# Known ways to train a dead model. Those that concern no app are in tests/training.


def test_adapters_that_get_no_gradient_are_refused_before_a_round(tmp_path):
    folder = save_causal(tmp_path / "dead")
    weights = tensors(folder / "model.safetensors")
    weights["embed_out.weight"].zero_()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lora-targets=''.*moves no adapter"):
        run(tmp_path / "run", str(folder))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("norm", "message"),
    [(1e-6, "nearly all of it is cut off"), (1e6, "noise will drown it"), (0.5, "")],
)
def test_a_clipping_norm_far_from_an_update_s_is_warned_of(norm, message, base, caplog):
    settings = {
        "clipping": "fixed",
        "clipping-norm": norm,
        "learning-rate": 0.3,
        "optimizer": "SGD",
        "weight-decay": 0.0,
    }
    whole = PRIVATE_LM.module("settings").Settings.of(config(base=base, **settings))
    trial = PRIVATE_LM.module("public_trial")
    with caplog.at_level(logging.WARNING, "flwr"):
        trial.try_on_public_text(whole, task(base, **settings), base)
    assert ("clipping-norm" in caplog.text) == bool(message)
    assert message in caplog.text


def test_labels_that_are_all_ignored_are_refused_by_name(base, texts):
    for path in (texts / "client0").iterdir():
        path.unlink()
    long = {"prompt": "a long question " * 9, "completion": "yes"}
    (texts / "client0" / "long.jsonl").write_text(json.dumps(long))
    with pytest.raises(ValueError, match="max-tokens=16: no text of this client leaves a token"):
        task(base, **of_folder(texts)).data(0)


def test_an_export_gives_back_the_model_of_the_run_and_generates(base, tmp_path):
    done = run(tmp_path / "run", base, **{"learning-rate": 0.5})
    export = PRIVATE_LM.module("export")
    for merge in (False, True):
        folder = tmp_path / f"merged-{merge}"
        export.export(done.path, folder, merge=merge)
        assert json.loads((folder / "guarantee.json").read_text())["guarantees"]
        from transformers import AutoTokenizer

        model, tokenizer = export.load_exported(folder), AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer("def ", return_tensors="pt", add_special_tokens=False)
        written = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        assert written.shape == (1, 9)
    with pytest.raises(ValueError, match="expected a folder that does not exist"):
        export.export(done.path, folder)


def test_an_export_without_its_adapters_is_refused(base, tmp_path):
    export, examples = PRIVATE_LM.module("export"), PRIVATE_LM.module("public_trial")
    adapted = task(base).model().model.eval()
    with pytest.raises(ValueError, match="lora_B is zero in all layers"):
        export.refuse_untrained(adapted)
    inputs = examples.public_examples(base, 16).features["input_ids"][:2]
    export.refuse_another_model(adapted, save_causal(tmp_path / "same"), inputs)  # B is zero
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.fill_(0.1)
    export.refuse_untrained(adapted)
    adapted.base_model.model.save_pretrained(tmp_path / "unmerged")
    for folder in (tmp_path / "same", tmp_path / "unmerged"):
        with pytest.raises(ValueError, match="the trained adapters are not in it"):
            export.refuse_another_model(adapted, folder, inputs)


def test_a_run_of_another_base_is_not_exported(base, tmp_path):
    done = run(tmp_path / "run", base, rounds=1, **{"evaluate-every": 0})
    other, use = str(save_causal(tmp_path / "other", seed=5)), done.path / "use.json"
    use.write_text(use.read_text().replace(task(base).fingerprint, task(other).fingerprint))
    with pytest.raises(ValueError, match="expected the base model with which the run trained"):
        PRIVATE_LM.module("export").export(done.path, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def uploads(base, folder):
    """Return each client's upload in one round, under noise that is the same each time."""
    problem = task(base, **of_folder(folder))
    strategy = strategy_of(
        DPFedAvg,
        plan=ReleasePlan(
            sampling=FullParticipation(3),
            rounds=1,
            delta=1e-5,
            clipping_norm=1.0,
            noise_multiplier=1.0,
            noise_placement="client",
        ),
        local=LocalTraining(epochs=1, batch_size=4, learning_rate=0.3),
        seed=2,
        seeded_noise=True,
        evaluate_every=0,
    )
    nodes = InProcessGrid(strategy.method.client_app(problem, allow_seeded_noise=True), 3)
    strategy.run.progress.begin()
    initial = ArrayRecord(problem.initial_params(2))
    requests = list(strategy.configure_train(1, initial, ConfigRecord(), nodes))
    places = {node: partition for partition, node in strategy.run.clients.nodes.items()}
    return {
        places[reply.metadata.src_node_id]: records.to_arrays(reply.content[records.UPDATE])
        for reply in nodes.send_and_receive(requests)
    }


ODD = {
    "empty": b"",
    "huge": b"spam and eggs " * 400,
    "no text": bytes(range(256)) * 4,
    "ill formed": b'{"completion": NaN}\n[1',
}


def test_no_bit_of_an_upload_depends_on_the_texts_of_another_client(base, texts):
    PRIVATE_LM.module("task").client_data.cache_clear()
    usual = uploads(base, texts)
    assert set(usual) == {0, 1, 2}
    for kind, content in ODD.items():
        for path in (texts / "client0").iterdir():
            path.unlink()
        for name in ("odd.txt", "odd.jsonl"):
            if name == "odd.txt" or kind == "ill formed":
                (texts / "client0" / name).write_bytes(content)
        PRIVATE_LM.module("task").client_data.cache_clear()
        others = uploads(base, texts)
        assert set(others) == {0, 1, 2}  # the odd client answers, too
        for client in (1, 2):
            for name, array in usual[client].items():
                assert array.tobytes() == others[client][name].tobytes(), (kind, client, name)
        assert any((usual[0][name] != others[0][name]).any() for name in usual[0])
