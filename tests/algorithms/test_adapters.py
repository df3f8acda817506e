"""Every family of methods trains LoRA adapters of a Hugging Face model, with FFA-LoRA too."""

from functools import cache, partial

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.nn.functional import cross_entropy

from flower_ext.algorithms import (
    Centaur,
    DP2FedSAM,
    DPDitto,
    DPFedAvg,
    UldpAvg,
    Upcycled,
)
from flower_ext.data import Examples, SiloData
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.privacy import FullParticipation, NonPrivatePlan, ReleasePlan
from flower_ext.training import DpSgdTraining, LocalTraining, Task, accuracy
from tests.support.grids import grid
from tests.support.plans import release_plan
from tests.support.strategies import group_strategy, strategy_of

CLIENTS, WORDS, LENGTH, RECORDS = 3, 30, 6, 8
HEAD = {
    f"base_model.model.classifier.modules_to_save.default.{leaf}" for leaf in ("weight", "bias")
}
LAYERS = [f"base_model.model.bert.encoder.layer.0.attention.self.{n}" for n in ("query", "value")]
FIRST, SECOND = (
    {f"{layer}.lora_{matrix}.default.weight" for layer in LAYERS} for matrix in ("A", "B")
)
SGD = LocalTraining(epochs=1, batch_size=4, learning_rate=0.1)
FFA = ("*.lora_B", "*.modules_to_save")


def build() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    return get_peft_model(BertForSequenceClassification(config), lora)


def silo(number: int) -> SiloData:
    """Return texts of users 0 … 5, each with records in every silo; half a text is padding."""
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(1, WORDS, (RECORDS + 4, LENGTH), generator=generator)
    mask = torch.ones_like(words)
    mask[::2, LENGTH // 2 :] = 0
    labels = (words[:, 0] > WORDS // 2).long()
    everything = Examples({"input_ids": words, "attention_mask": mask}, labels)
    return SiloData(
        train=everything.subset(range(RECORDS)),
        test=everything.subset(range(RECORDS, RECORDS + 4)),
        owners=torch.arange(RECORDS) % 6,
    )


@cache  # trials of a model count for all methods that train it
def task(trainable=None) -> Task:
    return Task(
        model=build,
        data=silo,
        loss=lambda outputs, labels: cross_entropy(outputs.logits, labels),
        metrics={"accuracy": lambda outputs, labels: accuracy(outputs.logits, labels)},
        device="cpu",
        trainable=trainable,
    )


plan = partial(release_plan, CLIENTS, noise_multiplier=0.1, rounds=2)


def users() -> ReleasePlan:
    return plan(sampling=FullParticipation(6))


def run(strategy, its_task: Task, rounds: int = 2):
    base = getattr(strategy, "base", strategy)
    base.frozen = its_task.fingerprint
    grid = InProcessGrid(base.method.client_app(its_task), num_clients=CLIENTS)
    result = strategy.start(grid, ArrayRecord(its_task.initial_params(0)), num_rounds=rounds)
    assert base.refusals == []
    return result.arrays.to_torch_state_dict()


PERSONAL = {"head": SGD, "extractor": SGD, "personal": ("*.classifier",)}
DP_SGD = DpSgdTraining(
    steps=2,
    sampling_rate=0.5,
    batch_size=4,
    learning_rate=0.1,
    clipping_norm=0.5,
    noise_multiplier=1.0,
)
METHODS = {
    "dp-fedavg": lambda: FederatedStrategy(DPFedAvg(local=SGD), plan(), seed=1),
    "centaur": lambda: strategy_of(Centaur, plan=plan(), **PERSONAL, seed=1),
    "dp2-fedsam": lambda: strategy_of(
        DP2FedSAM,
        plan=plan(),
        **{**PERSONAL, "extractor": LocalTraining(batch_size=4, sam_radius=0.05)},
        seed=1,
    ),
    "dp-ditto": lambda: FederatedStrategy(
        DPDitto(local=SGD, personal_training=SGD), plan(), seed=1
    ),
    "uldp-avg-w": lambda: FederatedStrategy(
        UldpAvg(num_silos=CLIENTS, weighting="by-records", local=SGD), users(), seed=1
    ),
    "uldp-group": lambda: group_strategy(
        num_users=6, num_silos=CLIENTS, group_size=2, local=DP_SGD, delta=0.1, seed=1
    ),
    "upcycled": lambda: Upcycled(FederatedStrategy(DPFedAvg(local=SGD), plan(), seed=1), 0.5),
}


CASES = [pytest.param(method, None, id=f"{method}-LoRA") for method in METHODS] + [
    pytest.param(method, FFA, id=f"{method}-FFA-LoRA") for method in ("dp-fedavg", "dp2-fedsam")
]
"""FFA-LoRA with a shared head and with personal ones."""


# Centaur shares what DP²-FedSAM shares. ULDP-GROUP shares what ULDP-AVG shares, and DP-SGD on LoRA
# is tested in `tests/training/dp`; six seconds of trials find its way through this model.
@pytest.mark.parametrize(
    ("method", "trainable"),
    grid(
        CASES,
        lambda name: "FFA" not in name and not name.startswith(("centaur", "uldp-group")),
    ),
)
def test_a_method_shares_adapters_and_leaves_the_base_where_it_was(method, trainable):
    loop_task = task(trainable)
    base = {name: value.clone() for name, value in loop_task.factory.facts.frozen.items()}
    start = loop_task.initial_params(0)
    end = run(METHODS[method](), loop_task)
    head = set() if method in ("centaur", "dp2-fedsam") else HEAD
    assert set(end) == head | (SECOND if trainable else FIRST | SECOND)
    assert all(not end[name].equal(start[name]) for name in end)
    assert all(value.equal(base[name]) for name, value in loop_task.factory.facts.frozen.items())


def test_a_round_averages_the_results_of_hugging_faces_loss_and_torchs_optimizer():
    loop_task, rate = task(), 0.05
    local = LocalTraining(
        epochs=2, batch_size=RECORDS, learning_rate=rate, optimizer="AdamW", weight_decay=0.01
    )
    everyone = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    end = run(FederatedStrategy(DPFedAvg(local=local), everyone, seed=1), loop_task, rounds=1)
    total: dict[str, torch.Tensor] = {}
    for client in range(CLIENTS):
        model = loop_task.model()
        model.load_state_dict(loop_task.initial_params(0), strict=False)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        steps = torch.optim.AdamW(trained.values(), lr=rate)
        examples = silo(client).train
        for _ in range(2):
            steps.zero_grad()
            model(**examples.features, labels=examples.targets).loss.backward()
            steps.step()
        for name, p in trained.items():
            total[name] = total.get(name, 0) + p.detach() / CLIENTS
    assert set(end) == set(total)
    for name, mean in total.items():
        torch.testing.assert_close(end[name], mean, atol=1e-5, rtol=0)
