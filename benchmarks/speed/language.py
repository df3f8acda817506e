"""A round of a language model with LoRA under client-level DP, beside a loop without messages.

    python -m benchmarks language [--size large] [--device cuda]

Clients train adapters by AdamW for one epoch. The loop trains them in the same way and adds up the
updates, but it clips nothing, adds no noise, and sends nothing. Both run in turn in one process.
The tiny base model is that of ``apps/private-lm``. The large one has the size of Pythia-410M,
random weights and bfloat16.
"""

import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from benchmarks.command_line import command_parser
from benchmarks.speed.turns import Measured, best_of
from benchmarks.speed.workload import Clock
from flower_ext.algorithms import DPFedAvg
from flower_ext.data import ClientData, Examples
from flower_ext.federation import FederatedStrategy, run_in_process
from flower_ext.privacy import FixedSizeSampling, ReleasePlan
from flower_ext.runs.page import table
from flower_ext.training import LocalTraining, Task
from flower_ext.training.models.factory import in_training
from flower_ext_pretrained.hugging_face import with_lora
from flower_ext_pretrained.next_token import LanguageModel, next_token_loss

LEARNING_RATE, TURNS = 1e-3, 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """A base model and its clients."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    half: bool
    clients: int
    texts: int
    batch: int
    tokens: int
    rounds: int = 4


SIZES = {
    "tiny": Size(
        layers=2, width=64, heads=4, vocabulary=259, half=False,
        clients=100, texts=12, batch=6, tokens=64,
    ),
    "large": Size(
        layers=24, width=1024, heads=16, vocabulary=50_304, half=True,
        clients=16, texts=32, batch=8, tokens=128,
    ),
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = command_parser(__doc__)
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    size, device = arguments.size, arguments.device
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    chosen = SIZES[size]
    task = Task(
        model=partial(build, chosen),
        data=partial(client_data, chosen),
        loss=next_token_loss,
        metrics={},
        device=device,
    )
    ways: dict[str, Callable[[Size, Task], list[float]]] = {
        "this package, with client-level DP": private_rounds,
        "loop without messages": plain_rounds,
    }

    def measured(way: Callable[[Size, Task], list[float]]) -> Measured:
        """Measure a round: the median of those after the first."""
        return Measured(1e3 * statistics.median(way(chosen, task)[1:]))

    best = best_of(TURNS, {name: partial(measured, way) for name, way in ways.items()})
    times = {name: one.milliseconds for name, one in best.items()}
    loop = times["loop without messages"]
    rows = [(name, f"{time:,.0f}", f"{time / loop:.2f}") for name, time in times.items()]
    print(
        table((f"{size}, {chosen.clients} clients a round", "ms a round", "times the loop"), rows)
    )
    if device != "cpu":
        print(f"peak memory of the accelerator: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


@cache
def base(size: Size) -> nn.Module:
    """Return the base model, with random weights."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config: Any = GPTNeoXConfig(  # type: ignore[call-arg, unused-ignore]
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=size.tokens,
    )
    model: nn.Module = GPTNeoXForCausalLM(config)
    return model.to(torch.bfloat16) if size.half else model


def build(size: Size) -> nn.Module:
    """Return the base model with adapters."""
    adapted = with_lora(deepcopy(base(size)), rank=4, only_b=True, task_type="CAUSAL_LM")
    return LanguageModel(adapted)


def client_data(size: Size, client: int) -> ClientData:
    """Return random texts."""
    generator = torch.Generator().manual_seed(client)
    shape = size.texts, size.tokens
    tokens = torch.randint(size.vocabulary, shape, generator=generator)
    examples = Examples(features=(tokens, tokens), targets=tokens)
    return ClientData(train=examples, test=examples)


def private_rounds(size: Size, task: Task) -> list[float]:
    """Return the seconds of each round of this package."""
    server, clock = ServerApp(), Clock()

    def after_round(server_round: int, result: Result) -> bool:
        clock.tick()
        return False

    @server.main()
    def _(grid: Grid, context: Context) -> None:
        local = LocalTraining(
            epochs=1, batch_size=size.batch, learning_rate=LEARNING_RATE, optimizer="AdamW"
        )
        plan = ReleasePlan(
            sampling=FixedSizeSampling(population=size.clients, size=size.clients),
            clipping_norm=1.0,
            noise_multiplier=1.0,
            rounds=size.rounds,
            delta=1e-5,
            noise_placement="client",
        )
        strategy = FederatedStrategy(DPFedAvg(local=local), plan, evaluate_every=0)
        model = ArrayRecord(task.initial_params(0))
        strategy.start(grid, model, num_rounds=size.rounds, should_stop=after_round)

    run_in_process(server, DPFedAvg.client_app(task), num_clients=size.clients)
    return clock.seconds()


def plain_rounds(size: Size, task: Task) -> list[float]:
    """Return the seconds of each round of a loop over clients."""
    device, clock = task.torch_device(), Clock()
    model = in_training(task.model().to(device))
    shared = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    weights = {name: model.get_parameter(name) for name in shared}
    for _ in range(size.rounds):
        total = {name: torch.zeros_like(p) for name, p in shared.items()}
        for client in range(size.clients):
            _train(model, weights, shared, task.data(client).train, size)
            for name, weight in weights.items():
                total[name].add_(weight.detach() - shared[name])
        for name, start in shared.items():
            start.add_(total[name], alpha=1 / size.clients)
        clock.tick()
    return clock.seconds()


def _train(
    model: nn.Module,
    weights: dict[str, nn.Parameter],
    start: dict[str, Tensor],
    examples: Examples,
    size: Size,
) -> None:
    for name, weight in weights.items():
        weight.data.copy_(start[name])
    optimizer = torch.optim.AdamW([*weights.values()], lr=LEARNING_RATE, weight_decay=0.0)
    tokens = examples.targets.to(next(iter(start.values())).device)
    for rows in torch.split(torch.randperm(len(tokens), device=tokens.device), size.batch):
        batch = tokens[rows]
        loss = next_token_loss(model(batch, batch), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    main()
