"""Write the adapters of a run as a PEFT folder, which Transformers and PEFT load.

In the folder of the app::

    python -m private_lm_app.export RUN FOLDER            # adapters, for the base model of the run
    python -m private_lm_app.export RUN FOLDER --merge    # the whole model, adapters merged into it
"""

import argparse
import json
import sys
from copy import deepcopy
from pathlib import Path

import torch
from flwr.app import Context, RecordDict
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.files import write_whole
from flower_ext.runs import RunDirectory
from flower_ext_pretrained.hugging_face import pretrained
from private_lm_app.public_trial import public_examples
from private_lm_app.settings import Settings
from private_lm_app.task import base_of, task_of

GUARANTEE = "guarantee.json"
_TOLERANCE = 1e-3
"""Largest difference of log-probabilities that rounding explains; in half precision it is 0.1."""


def export(run: Path, folder: Path, *, merge: bool = False) -> None:
    """Write adapters (or with ``merge`` the whole model), tokenizer and guarantee to a new folder.

    Raises
    ------
    InvalidValue
        The run has not ended, or its training changed no adapter; the base model is not the one of
        the run; the folder exists already; or the model that is loaded from the new folder differs
        from the trained model.
    """
    directory = RunDirectory.open(run)
    if not (directory.path / "model.safetensors").is_file():
        raise InvalidValue(
            f"run={str(run)!r}: expected a run that has ended, but it has no model.safetensors; "
            "continue it with flower-ext run APP --resume RUN"
        )
    if folder.exists():
        raise InvalidValue(f"folder={str(folder)!r}: expected a folder that does not exist yet")
    config = dict(directory.config)
    context = Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config=config)
    task, base = task_of(context), base_of(Settings.of(config))
    if task.fingerprint != directory.use().get("frozen", task.fingerprint):
        raise InvalidValue(f"base={base!r}: expected the base model with which the run trained")
    model = task.model()
    model.load_state_dict(load_file(directory.path / "model.safetensors"), strict=False)
    adapted = model.model.eval()
    refuse_untrained(adapted)
    tokenizer = pretrained("AutoTokenizer", base, setting="base")
    inputs = public_examples(base, Settings.of(config).max_tokens).features["input_ids"][:4]
    written = deepcopy(adapted).merge_and_unload() if merge else adapted
    written.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    guarantees = [guarantee.to_dict() for guarantee in directory.guarantees()]
    content = {"run": directory.id, "base": base, "guarantees": guarantees}
    write_whole(folder / GUARANTEE, json.dumps(content, indent=2, ensure_ascii=False).encode())
    refuse_another_model(adapted, folder, inputs)


def refuse_untrained(adapted: nn.Module) -> None:
    """Refuse adapters whose product B·A is zero: the model would be the base model.

    Raises
    ------
    InvalidValue
    """
    if not any(w.any() for name, w in adapted.named_parameters() if ".lora_B." in name):
        raise InvalidValue(
            "lora_B is zero in all layers, so the model equals its base: expected a run whose "
            "rounds changed the adapters (with method='alone', clients share none)"
        )


def refuse_another_model(adapted: nn.Module, folder: Path, inputs: torch.Tensor) -> None:
    """Load the model in ``folder``, and refuse it unless its outputs agree with ``adapted``'s.

    Parameters
    ----------
    inputs : Tensor
        Token numbers (n, tokens) to try.

    Raises
    ------
    InvalidValue
        The outputs differ: the folder has neither the adapters nor a model that includes them.
    """
    loaded = load_exported(folder)
    with torch.no_grad():
        before, after = (
            m(input_ids=inputs, use_cache=False).logits.float().log_softmax(dim=2)
            for m in (adapted, loaded)
        )
    is_half = next(adapted.parameters()).dtype in (torch.float16, torch.bfloat16)
    off = float((before - after).abs().max())
    if not off <= (0.1 if is_half else _TOLERANCE):
        raise InvalidValue(
            f"folder={str(folder)!r}: its model is off by {off:.2g} in log-probabilities, so the "
            "trained adapters are not in it: expected adapter files beside the base, or a model "
            "into which they are merged"
        )


def load_exported(folder: Path) -> nn.Module:
    """Return the model of a folder: a base with adapters, or a whole model."""
    is_adapter = (folder / "adapter_config.json").is_file()
    kind = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    loaded: nn.Module = kind.from_pretrained(str(folder), dtype="auto").eval()
    return loaded


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--merge", action="store_true")
    arguments = parser.parse_args()
    try:
        export(arguments.run, arguments.folder, merge=arguments.merge)
    except FlowerExtError as error:
        sys.exit(str(error))
    print(f"Model: {arguments.folder}")


if __name__ == "__main__":
    main()
