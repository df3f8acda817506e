"""The learning problem that the run configuration asks for."""

from functools import cache, partial

from flwr.app import Context
from torch import nn

from flower_ext.data import ClientData
from flower_ext.federation import node_settings
from flower_ext.runs.settings import absolute_path
from flower_ext.training import Task
from flower_ext_pretrained.hugging_face import causal_model, pretrained, with_lora
from flower_ext_pretrained.next_token import (
    LanguageModel,
    exact_match,
    next_token_loss,
    perplexity,
    token_accuracy,
)
from private_lm_app.base import TARGETS, tiny_base
from private_lm_app.settings import Settings
from private_lm_app.texts import Texts

AUTHORS = "uldp-avg-w"
"""The method whose privacy unit is an author."""
METRICS = {"perplexity": perplexity, "accuracy": token_accuracy, "exact_match": exact_match}


def task_of(context: Context) -> Task:
    """Return the task of a run, for its clients and its server alike."""
    settings = node_settings(Settings, context)
    base = base_of(settings)
    targets = settings.lora_targets or ("all-linear" if settings.base else TARGETS)
    lora = (settings.lora_rank, settings.lora_only_b, targets)
    return Task(
        model=partial(build, base, *lora),
        data=partial(client_data, texts_of(settings), base, settings.max_tokens),
        loss=next_token_loss,
        metrics=METRICS,
    )


def base_of(settings: Settings) -> str:
    """Return the folder or name of the base model; make the tiny one if there is no other."""
    return settings.base or str(tiny_base(absolute_path(settings.cache_folder)))


def texts_of(settings: Settings) -> Texts:
    """Return the texts that the settings name."""
    return Texts(
        of_python=settings.dataset == "python",
        folder=absolute_path(settings.data_folder),
        clients=settings.clients,
        texts_per_client=settings.texts_per_client,
        users=settings.num_users if settings.method == AUTHORS else 0,
        seed=settings.seed,
    )


def build(base: str, rank: int, only_b: bool, targets: str) -> nn.Module:
    """Return the base model with adapters. Training changes only the adapters."""
    model = causal_model(base, setting="base")
    return LanguageModel(
        with_lora(model, rank=rank, only_b=only_b, targets=targets, task_type="CAUSAL_LM")
    )


@cache
def client_data(texts: Texts, base: str, max_tokens: int, client: int) -> ClientData:
    """Return one client's examples."""
    return texts.client_data(pretrained("AutoTokenizer", base, setting="base"), max_tokens, client)
