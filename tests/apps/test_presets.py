"""Presets hold what the papers print: every number is stated here a second time, with its place."""

from pathlib import Path

import pytest

from flower_ext.cli.preparing import RunOptions, prepare
from flower_ext.errors import InvalidValue
from flower_ext.runs.app_settings import SettingsFile, preset, presets
from tests.support.apps import DP2_FEDSAM, DP_DITTO, ULDP_FL, UPCYCLED_FL

# DP²-FedSAM, Section 5.1: T, r, learning rates and their decay, epochs, CIFAR-10's C, q, momentum.
DP2 = {
    "method": "dp2-fedsam",
    "rounds": 200,
    "dataset": "cifar10",
    "partition": "pathological",
    "sampling": "fixed-size",
    "sampling-rate": 0.05,
    "delta": 0.0,  # δ = 1/N
    "calibration": "published",  # Theorem 2
    "noise-placement": "client",
    "clipping-norm": 0.1,
    "momentum": 0.7,
    "local-epochs": 2,
    "head-epochs": 2,
    "learning-rate": 0.1,
    "head-learning-rate": 0.005,
    "learning-rate-decay": 0.99,
    "sam-radius": 0.1,
    "server-learning-rate": 1.0,
    "adapt-before-evaluation": False,
}
# Uldp-FL, Section 5.1: σ and δ of every experiment. The paper prints no learning rates and lengths
# of training; those are of the authors' scripts.
ULDP = {"method": "uldp-avg-w", "noise-multiplier": 5.0, "delta": 1e-5}
ULDP_SCRIPTS = {"clipping-norm": 0.1, "batch-size": 64, "server-learning-rate": 1.0}
CREDITCARD = {"learning-rate": 0.01, "local-epochs": 50, "record-clipping-norm": 0.1, "rounds": 100}
MNIST = {"learning-rate": 0.01, "local-epochs": 50, "record-clipping-norm": 1.0, "rounds": 200}
MEDICAL = {"learning-rate": 0.001, "local-epochs": 50, "record-clipping-norm": 0.1, "rounds": 50}
DATA = {
    "4": ("creditcard", 5, CREDITCARD),
    "5": ("mnist", 5, MNIST),
    "6": ("heart-disease", 4, MEDICAL),
    "7": ("tcga-brca", 6, MEDICAL),
}
# DP-Ditto, Section VI: N, δ, C, η_G and η_L; Eqn (8) gives the noise.
DITTO = {
    "method": "dp-ditto",
    "clients": 20,
    "delta": 0.01,
    "clipping-norm": 20.0,
    "calibration": "published",
    "noise": "upload",
    "learning-rate": 0.005,
    "personal-learning-rate": 0.005,
}
WORLDS = {
    "mnist-mlr": ("mnist", "mnist-logistic", 2500),
    "mnist-dnn": ("mnist", "mnist-dnn", 2500),
    "fmnist-cnn": ("fashion-mnist", "mnist-cnn-32-64", 2500),
    "cifar10-cnn": ("cifar10", "cifar10-cnn-32-64", 2000),
}
# (T, ε, λ) of Figures 3, 4 (captions), 5, 6 (captions) and 7 (Section VI, last paragraph).
FIGURES = {
    "fig3": (30, 10.0, 0.005),
    "fig4": (30, 100.0, 0.01),
    "fig5": (30, 10.0, 0.1),
    "fig6": (30, 10.0, 0.1),
    "fig7": (80, 100.0, 0.1),
}
# Upcycled-FL, Section 7.2 and Appendix F.1: devices, E, momentum, share of devices, and noise.
SYNTHETIC = {
    "syniid": "synthetic-iid",
    "syn00": "synthetic-0-0",
    "syn05": "synthetic-0.5-0.5",
    "syn11": "synthetic-1-1",
}
UPCYCLED = {
    "upcycled": True,
    "clients": 30,
    "solver": "sgd",
    "local-epochs": 10,
    "momentum": 0.5,
}


def dp2(name):
    table, clients, classes = name.split("-")[1:]
    epsilon = {"table2": 1.0, "table3": 2.0}[table]
    numbers = {"clients": int(clients), "classes-per-client": int(classes), "epsilon": epsilon}
    return {**DP2, **numbers}, {}


def uldp(name):
    _, figure, *case = name.split("-")
    figure = figure.removeprefix("fig")
    if figure == "8":  # 1,000 users, zipf
        data = ("creditcard", int(case[0]), CREDITCARD)
        users, distribution, labels = 1000, "zipf", 0
    elif figure == "10":
        data = DATA["4"] if case == ["creditcard"] else DATA["5"]
        users, distribution, labels = (1000 if case == ["creditcard"] else 10_000), "zipf", 0
    else:
        data, users, distribution = DATA[figure], int(case[0]), case[1]
        labels = 2 if "noniid" in case else 0
    dataset, silos, scripts = data
    numbers = {
        "dataset": dataset,
        "num-silos": silos,
        "num-users": users,
        "distribution": distribution,
        "labels-per-user": labels,
    }
    average = {
        "local-epochs": 30 if dataset == "creditcard" else 50,
        "server-learning-rate": 100.0 if users == 10_000 else 10.0,
    }
    methods = {"uldp-sgd": {"server-learning-rate": 10.0}}
    methods |= dict.fromkeys(("uldp-avg", "uldp-avg-w"), average)
    where = {"method": methods}
    if figure in DATA:
        records = {"creditcard": 23_600, "mnist": 60_000, "heart-disease": 486, "tcga-brca": 866}
        where["group-size"] = {
            size: group(
                min((int(size) if size.isdigit() else 10**9) * users, records[dataset]), silos
            )
            for size in ("2", "8", "median", "max")
        }
    return {**ULDP, **ULDP_SCRIPTS, **scripts, **numbers}, where


def group(kept, silos):
    """Return rate and divisor of DP-SGD for 64 expected records of a silo's part of ``kept``."""
    rate = min(1.0, round(64 * silos / kept, 4))
    return {"record-sampling-rate": rate, "expected-batch-size": round(rate * kept / silos, 1)}


def ditto(name):
    _, figure, world = name.split("-", 2)
    dataset, model, examples = WORLDS[world]
    rounds, epsilon, weight = FIGURES[figure]
    numbers = {
        "dataset": dataset,
        "model": model,
        "examples-per-client": examples,
        "rounds": rounds,
        "epsilon": epsilon,
        "global-weight": weight,
    }
    return {**DITTO, **numbers, **({"clipping-norm": 10.0} if figure == "fig7" else {})}, {}


def upcycled(name):
    _, place, data = name.split("-")
    values = {**UPCYCLED, "dataset": SYNTHETIC[data]}
    own_data = {"classes": 0, "unit-features": False, "model": ""}
    if place.startswith("table"):
        stragglers = {"table1": 0.9, "table3": 0.3}[place]
        values |= {"rounds": 160, "sampling-rate": 0.3, "straggler-ratio": stragglers}
        values |= {"exact-stragglers": True}
        values |= {"perturbation": "none", "proximal-weight": 0.0, **own_data}
        return values, {
            "upcycled": {"false": {"rounds": 80}},
            # f = Σ p_i F_i with p_i in proportion to a device's records. Flower's strategies weigh
            # clients so by themselves, and FedDyn has no such form.
            "method": {name: {"weighting": "examples"} for name in ("scaffold", "pfedme")},
        }
    values |= {"rounds": 80, "sampling-rate": 1.0, "straggler-ratio": 0.0}
    if place == "fig3":
        values |= {"perturbation": "output", "delta": 1e-5, "noise-stddev": 0.8}
        values |= {"proximal-weight": 0.0, **own_data}
        return values, {"upcycled": {"false": {"noise-stddev": 1.0}}}
    # Theorem 6.3 holds for a generalised linear model and records of norm 1.
    values |= {"perturbation": "objective", "noise-rate": 20.0, "proximal-weight": 0.5}
    values |= {"classes": 2, "unit-features": True, "model": "binary-logistic"}
    return values, {"upcycled": {"false": {"noise-rate": 10.0}}}


PAPERS = ((DP2_FEDSAM, dp2), (ULDP_FL, uldp), (DP_DITTO, ditto), (UPCYCLED_FL, upcycled))
ALL = [(app, printed, name) for app, printed in PAPERS for name in presets(app.folder)]


@pytest.mark.parametrize(("app", "printed", "name"), ALL, ids=[name for *_, name in ALL])
def test_a_preset_has_the_paper_s_numbers_and_no_others(app, printed, name):
    file = preset(app.folder, name)
    assert (dict(file.shared), dict(file.special)) == printed(name)
    assert file.title


@pytest.mark.parametrize(("app", "printed", "name"), ALL, ids=[name for *_, name in ALL])
def test_an_app_accepts_each_of_its_presets(app, printed, name, tmp_path):
    run = prepare(RunOptions(app=app.folder, preset=name, runs=tmp_path, in_process=True))
    settings = app.module("settings").Settings.of(run.config)
    assert settings.preset.startswith(f"{name} (")
    assert "changed" not in settings.preset


def test_a_presets_noise_is_what_the_papers_theorem_gives(tmp_path):
    options = RunOptions(
        app=DP2_FEDSAM.folder, preset="dp2-table2-1000-2", runs=tmp_path, in_process=True
    )
    settings = DP2_FEDSAM.module("settings").Settings.of(prepare(options).config)
    plan = DP2_FEDSAM.module("server_app").plan_of(settings)
    # Theorem 2: σ² = 7 r² T (ε + 2 ln(1/δ)) / ε² = 51.85
    assert plan.noise_multiplier == pytest.approx(7.2008, abs=1e-3)


def prepared(app, tmp_path, **options):
    return prepare(RunOptions(app=app.folder, runs=tmp_path, in_process=True, **options)).config


def test_set_changes_a_preset_and_the_run_records_what_it_changed(tmp_path):
    changes = ["rounds=3", "method=centaur", "seed=1", "data-folder=/data"]
    config = prepared(DP2_FEDSAM, tmp_path, preset="dp2-table2-1000-2", settings=changes)
    assert (config["rounds"], config["method"], config["clients"]) == (3, "centaur", 1000)
    assert config["preset"].endswith("ε = 1), changed: rounds")


def test_values_for_a_method_hold_for_that_method_unless_set_changes_them(tmp_path):
    name = "uldp-fig4-1000-zipf"
    rates = {
        method: prepared(ULDP_FL, tmp_path, preset=name, settings=[f"method={method}"])
        for method in ("uldp-naive", "uldp-sgd")
    }
    assert {m: config["server-learning-rate"] for m, config in rates.items()} == {
        "uldp-naive": 1.0,
        "uldp-sgd": 10.0,
    }
    chosen = ["method=uldp-sgd", "server-learning-rate=2.5"]
    config = prepared(ULDP_FL, tmp_path, preset=name, settings=chosen)
    assert config["server-learning-rate"] == 2.5
    assert config["preset"].endswith("changed: server-learning-rate")


def test_values_for_a_default_of_the_app_hold_too(tmp_path):
    chosen = ["method=uldp-group"]  # the app's group-size is 8
    config = prepared(ULDP_FL, tmp_path, preset="uldp-fig4-1000-zipf", settings=chosen)
    assert config["record-sampling-rate"] == pytest.approx(64 * 5 / 8000)


def test_a_pair_s_plain_half_trains_as_often(tmp_path):
    config = prepared(
        UPCYCLED_FL, tmp_path, preset="upcycled-table1-syn00", settings=["upcycled=false"]
    )
    assert config["rounds"] == 80
    assert "changed" not in config["preset"]


def test_a_file_of_the_user_is_read_like_a_preset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[settings]\nclients = 7\nrounds = 2\n")
    config = prepared(DP2_FEDSAM, tmp_path, settings_file=path, clients=9)
    assert (config["clients"], config["rounds"]) == (9, 2)
    assert config["preset"] == "mine, changed: clients"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[settings]\nrund = 3\n", "settings file mine: no setting 'rund'; did you mean rounds?"),
        ("[settings]\nrounds = 'x'\n", "settings file mine: rounds='x': expected an integer >= 1"),
        ("rounds = 3\n", r"expected title = \"…\", a table \[settings\]"),
        ("[settings]\nrounds 3\n", "is not valid TOML"),
        ("[where]\nmethod = 3\n", r"expected title = \"…\", a table \[settings\]"),
        ("[where.method]\ncentaur = 3\n", r"expected title = \"…\", a table \[settings\]"),
    ],
)
def test_a_file_that_an_app_cannot_use_is_refused_by_name(text, message, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=message):
        prepared(DP2_FEDSAM, tmp_path, settings_file=path)


def test_an_unknown_preset_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(InvalidValue, match="no such preset; did you mean .*dp2-table2-1000-2"):
        prepared(DP2_FEDSAM, tmp_path, preset="dp2-table2-1000-3")
    with pytest.raises(InvalidValue, match="No such file"):
        prepared(DP2_FEDSAM, tmp_path, settings_file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "a", "settings_file": Path("b")}, "either --preset or --settings"),
        ({"preset": "a", "resume": Path("run")}, "leave out --preset"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message, tmp_path):
    with pytest.raises(InvalidValue, match=message):
        prepared(DP2_FEDSAM, tmp_path, **options)


def test_a_title_is_optional(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("")
    assert SettingsFile.read(path).text({}, {}) == "mine"
