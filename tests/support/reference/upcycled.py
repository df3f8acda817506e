"""The seven methods of the Upcycled-FL paper as the plainest loops, plain and upcycled.

Models are flat vectors, and the gradients of all added terms are written out by hand. The loops
take from the package only what a comparison needs in common: cohorts, straggler draws, batch orders
and the initial model.
"""

from __future__ import annotations

import math

import torch
from torch.nn.utils import parameters_to_vector

from flower_ext.data import ClientData, Examples
from flower_ext.privacy import seeded_generator
from flower_ext.training import Task
from tests.support.reference.steps import batch_order, slope
from tests.support.worlds import Net, client_data


def uneven_data(client):
    """Return clients of different sizes, so that weighting and numbers of steps matter."""
    data = client_data(client)
    size = 12 + 3 * client
    train = Examples(features=data.train.features[:size], targets=data.train.targets[:size])
    return ClientData(train=train, test=data.test)


def task():
    return Task(model=Net, data=uneven_data, device="cpu")


class Client:
    """One client in one round: its data, its epochs (fewer for a straggler) and its batches."""

    def __init__(self, number, *, epochs, rate, momentum, batch, generator):
        self.number = number
        self.data = uneven_data(number).train
        self.epochs, self.rate, self.momentum, self.batch = epochs, rate, momentum, batch
        self.generator = generator

    def batches(self):
        for _ in range(self.epochs):
            order = torch.randperm(len(self.data), generator=self.generator)
            for start in range(0, len(order), self.batch):
                rows = order[start : start + self.batch]
                yield self.data.features[rows], self.data.targets[rows]

    def sgd(self, w, added=lambda w: 0.0):
        """Return the model after local training, and the number of its gradient steps."""
        velocity, share, acted = torch.zeros_like(w), 0.0, 0.0
        for x, y in self.batches():
            velocity = self.momentum * velocity + slope(w, x, y) + added(w)
            w = w - self.rate * velocity
            share = self.momentum * share + 1  # the accumulated weight of a constant gradient
            acted += share
        return w, acted


def weighted_mean(models, clients):
    total = sum(len(c.data) for c in clients)
    return sum(len(c.data) / total * w for w, c in zip(models, clients, strict=True))


def fedavg(x, clients, server, memory):
    return weighted_mean([c.sgd(x)[0] for c in clients], clients)


def fedprox(x, clients, server, memory, *, mu):
    return weighted_mean([c.sgd(x, lambda w: mu * (w - x))[0] for c in clients], clients)


def fedavgm(x, clients, server, memory, *, rate, momentum):
    step = x - fedavg(x, clients, server, memory)
    server["v"] = momentum * server.get("v", 0.0) + step
    return x - rate * server["v"]


def fedyogi(x, clients, server, memory, *, eta, beta_1, beta_2, tau):
    delta = fedavg(x, clients, server, memory) - x
    zero = torch.zeros_like(x)
    server["m"] = beta_1 * server.get("m", zero) + (1 - beta_1) * delta
    v = server.get("v", zero)
    server["v"] = v - (1 - beta_2) * delta**2 * torch.sign(v - delta**2)
    return x + eta * server["m"] / (torch.sqrt(server["v"]) + tau)


def scaffold(x, clients, server, memory, *, population, rate):
    zero = torch.zeros_like(x)
    c = server["c"] = server.get("c", zero)
    moves, changes = [], []
    for client in clients:
        control = memory.get(client.number, zero)
        y, steps = client.sgd(x, lambda w, control=control: c - control)
        renewed = control - c + (x - y) / (steps * client.rate)
        moves.append(y - x)
        changes.append(renewed - control)
        memory[client.number] = renewed
    # The server's Δc equals c⁺ᵢ − cᵢ on the client, although c is never sent.
    server["c before"], server["c"] = c, c + sum(changes) / population
    return x + rate * sum(moves) / len(moves)


def feddyn(x, clients, server, memory, *, population, alpha):
    zero = torch.zeros_like(x)
    models = []
    for client in clients:
        g = memory.get(client.number, zero)
        theta, _ = client.sgd(x, lambda w, g=g: -g + alpha * (w - x))
        memory[client.number] = g - alpha * (theta - x)
        models.append(theta)
    server["h"] = server.get("h", zero) - alpha / population * sum(w - x for w in models)
    return sum(models) / len(models) - server["h"] / alpha


def pfedme(x, clients, server, memory, *, attraction, inner_steps, inner_rate, beta):
    models = []
    for client in clients:
        w, theta = x, x
        for features, targets in client.batches():
            for _ in range(inner_steps):
                down = slope(theta, features, targets) + attraction * (theta - w)
                theta = theta - inner_rate * down
            w = w - client.rate * attraction * (w - theta)
        memory[client.number] = theta
        models.append(w)
    return (1 - beta) * x + beta * sum(models) / len(models)


METHODS = {
    "fedavg": fedavg,
    "fedavgm": fedavgm,
    "fedprox": fedprox,
    "fedyogi": fedyogi,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "pfedme": pfedme,
}


def federated(method, *, seed, sampling, stragglers, rounds, local, coefficient=None, **numbers):
    """Return the model, server state and client memories after ``rounds``, even ones included.

    ``coefficient`` is a function from m to c_m. If it is given, every even round only extrapolates.
    All random draws and decays are numbered by training rounds.
    """
    start = task().initial_params(seed)
    w = before = parameters_to_vector(start[name] for name, _ in Net().named_parameters())
    server, memory = {}, {}
    m = 0
    for t in range(1, rounds + 1):
        if coefficient is not None and t % 2 == 0:
            w = w + coefficient(m) * (w - before)
            if "c" in server:
                server["c"] = server["c"] + coefficient(m) * (server["c"] - server["c before"])
            continue
        m += 1
        cohort = sampling.draw(seeded_generator(seed, "cohort", m))
        slow = stragglers.draw(cohort, sampling.population, seeded_generator(seed, "stragglers", m))
        clients = [
            Client(
                number,
                epochs=1 + math.floor(slow[number] * (local.epochs - 1))
                if number in slow
                else local.epochs,
                rate=local.learning_rate * local.learning_rate_decay ** (m - 1),
                momentum=local.momentum,
                batch=local.batch_size,
                generator=batch_order(seed, number, m),
            )
            for number in cohort
        ]
        before, w = w, METHODS[method](w, clients, server, memory, **numbers)
    return w, server, memory
