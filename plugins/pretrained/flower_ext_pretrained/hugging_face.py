"""Pretrained models of Hugging Face's Transformers, and LoRA adapters of PEFT on them."""

from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Any, cast

from torch import nn

from flower_ext.errors import InvalidValue
from flower_ext.plugins import how_to_install
from flower_ext.training.models.factory import tied_names


@cache
def pretrained(kind: str, folder: str, *, setting: str, **options: Any) -> Any:
    """Return ``transformers.<kind>.from_pretrained(folder)``, loaded once per process.

    Copy a model before you change it.

    Raises
    ------
    InvalidValue
        There is no such model or tokenizer, and the message names ``setting``; or Transformers is
        not installed.
    """
    transformers = _imported("transformers")
    transformers.utils.logging.disable_progress_bar()
    try:
        return getattr(transformers, kind).from_pretrained(folder, **options)
    except (OSError, ValueError) as error:  # no folder with a model, and no download
        raise InvalidValue(
            f"{setting}={folder!r}: {str(error).splitlines()[0]} If you are offline, name a local "
            "folder with a model and its tokenizer, as save_pretrained writes them"
        ) from error


def causal_model(folder: str, *, setting: str) -> nn.Module:
    """Return a fresh causal language model from a folder, with numbers of the files' type.

    Raises
    ------
    InvalidValue
        There is no such model, or its files lack a weight. A missing weight would begin at random,
        and a frozen weight would stay random. The message names ``setting``.
    """
    loaded = pretrained(
        "AutoModelForCausalLM", folder, setting=setting, dtype="auto", output_loading_info=True
    )
    model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
    if missing:
        raise InvalidValue(
            f"{setting}={folder!r}: its files lack {', '.join(missing[:3])}, and these weights "
            f"would be random: expected a folder that {type(model).__name__}.save_pretrained "
            "wrote, with all weights. A head that is tied to the embedding needs "
            "tie_word_embeddings=true in config.json"
        )
    return deepcopy(cast(nn.Module, model))


def with_lora(
    model: nn.Module, *, rank: int, only_b: bool, targets: str = "all-linear", **options: Any
) -> Any:
    """Return a PEFT model: ``model`` with frozen weights, and low-rank matrices B·A that train.

    Each matrix B·A is added to the weight of a linear layer.

    Adapters are in float32 whatever the type of ``model``, because sums of noised updates need
    this precision.

    Parameters
    ----------
    rank : int
        Rank r of the products; they are scaled by 2.
    only_b : bool
        Train B only. A keeps its random start, the same on all nodes. The mean of the clients'
        products B·A is then the mean of their B, times A (FFA-LoRA, Sun et al. 2024).
    targets : str
        ``all-linear`` (all but the head), or names of layers, separated by commas.
    **options
        Further fields of ``peft.LoraConfig``.

    Raises
    ------
    InvalidValue
        ``targets`` names a layer that is not linear, that does not exist, or that is tied to
        another; or PEFT is not installed.
    """
    peft = _imported("peft")
    names: str | list[str] = targets
    if targets != "all-linear":  # for "all-linear", PEFT finds the layers, and leaves out the head
        names = [*filter(None, targets.split(","))]
        _refuse_tied(model, names)
        _refuse_unknown(model, names)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, **options)
    adapted = peft.get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if only_b and ".lora_A." in name:
            parameter.requires_grad_(False)
    return adapted


def _imported(library: str) -> Any:
    """Import Transformers or PEFT. Each takes seconds, so only the functions that need it do so."""
    try:
        return import_module(library)
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise InvalidValue.tellable(
            f"{library} is not installed: {how_to_install('flower-ext-pretrained[text]')}"
        ) from error


def _refuse_unknown(model: nn.Module, names: list[str]) -> None:
    """Refuse a name that no linear layer has. PEFT ignores such a name if another name matches."""
    layers = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    ]
    leaves = {name.rpartition(".")[2] for name in layers}
    for target in names or [""]:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise InvalidValue(
                f"LoRA targets={','.join(names)!r}: {target!r} names no linear layer of "
                f"{type(model).__name__}; expected all-linear, or some of "
                f"{', '.join(sorted(leaves))}"
            )


def _refuse_tied(model: nn.Module, names: list[str]) -> None:
    """Refuse an adapter on a layer that shares its weight with another layer.

    An adapter that is merged into the shared weight would change both layers.
    """
    for pair in tied_names(model).items():
        layers = [name.rpartition(".")[0] for name in pair]
        leaves = [name.rpartition(".")[2] for name in layers]
        if tied := [leaf for leaf in leaves if leaf in names]:
            raise InvalidValue(
                f"LoRA targets={','.join(names)!r}: leave out {tied[0]!r}, because {layers[0]!r} "
                f"and {layers[1]!r} share one weight, so an adapter that is merged into one layer "
                "would change both"
            )
