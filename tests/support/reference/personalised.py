"""FedPer, FedRep, FedBN and APFL as plain loops over `nn.Module`, as PFLlib defines them.

Every client owns a whole model. A round copies the server's shared parameters into it, trains it by
`torch.optim.SGD`, and averages the shared parameters with weights by examples. The loops take from
the package only batch orders and the initial model. Of APFL they follow the paper, where PFLlib
differs.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tests.support.reference.steps import batch_order


def federated(method, task, *, seed, clients, rounds, is_personal=lambda name: False, **numbers):
    """Return the server's shared parameters, and each client's model and memory."""
    server = task.model()
    server.load_state_dict(task.initial_params(seed))
    shared = [name for name, _ in server.named_parameters() if not is_personal(name)]
    models = [deepcopy(server) for _ in range(clients)]
    memories = [{} for _ in range(clients)]
    examples = [task.data(client).train for client in range(clients)]
    for t in range(1, rounds + 1):
        for client, model in enumerate(models):
            copy_parameters(server, model, shared)
            order = batch_order(seed, client, t)
            method(model, examples[client], order, is_personal, memories[client], **numbers)
        with torch.no_grad():
            total = sum(map(len, examples))
            for name in shared:
                parts = [
                    model.get_parameter(name) * len(data)
                    for model, data in zip(models, examples, strict=True)
                ]
                server.get_parameter(name).copy_(sum(parts) / total)
    return {name: server.get_parameter(name).detach() for name in shared}, models, memories


def copy_parameters(source, target, names):
    with torch.no_grad():
        for name in names:
            target.get_parameter(name).copy_(source.get_parameter(name))


def mini_batches(examples, order, training):
    for _ in range(training.epochs):
        for rows in torch.randperm(len(examples), generator=order).split(training.batch_size):
            yield examples.features[rows], examples.targets[rows]


def descend(model, parameters, examples, order, training):
    """Train parameters in place by plain SGD."""
    optimizer = torch.optim.SGD(parameters, lr=training.learning_rate)
    model.train()
    for x, y in mini_batches(examples, order, training):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def jointly(model, examples, order, is_personal, memory, *, local):
    """Train all parameters (FedPer, FedBN)."""
    descend(model, model.parameters(), examples, order, local)


def head_first(model, examples, order, is_personal, memory, *, head, extractor):
    """Train the personal parameters, then the shared ones (FedRep)."""
    for training, turn in ((head, True), (extractor, False)):
        chosen = [p for name, p in model.named_parameters() if is_personal(name) == turn]
        descend(model, chosen, examples, order, training)


def mixture(model, examples, order, is_personal, memory, *, local, alpha, alpha_rate=0.0):
    """Train w, which is ``model``, and v by the gradient at their mixture (APFL)."""
    w = dict(model.named_parameters())
    v = memory.setdefault("v", {name: p.detach().clone() for name, p in w.items()})
    alpha = memory.setdefault("alpha", alpha)
    for number, (x, y) in enumerate(mini_batches(examples, order, local)):
        v = {name: p.detach().requires_grad_() for name, p in v.items()}
        w = {name: p.detach().requires_grad_() for name, p in w.items()}
        weight = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        mixed = {n: weight.to(w[n].dtype) * v[n] + (1 - weight.to(w[n].dtype)) * w[n] for n in w}
        at_mixture = cross_entropy(functional_call(model, mixed, (x,)), y)
        *slopes, along = torch.autograd.grad(at_mixture, [*v.values(), weight])
        moves = torch.autograd.grad(
            cross_entropy(functional_call(model, w, (x,)), y), list(w.values())
        )
        rate = local.learning_rate
        v = {n: p - rate * g for (n, p), g in zip(v.items(), slopes, strict=True)}
        w = {n: p - rate * g for (n, p), g in zip(w.items(), moves, strict=True)}
        if number == 0:
            alpha = min(1.0, max(0.0, alpha - alpha_rate * float(along)))
    memory.update(v={name: p.detach() for name, p in v.items()}, alpha=alpha)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(w[name])
