"""DP-Ditto and its four baselines as the plainest loops, with or without noise on uploads.

Models are flat vectors, and the gradients of all added terms are written out by hand. The loops
take from the package only what a comparison needs in common: batch orders, the initial model and
seeded noise. All clients take part in every round.
"""

from __future__ import annotations

import math

import torch
from torch.nn.utils import parameters_to_vector

from flower_ext.privacy import SeededNoise
from tests.support.reference.steps import batch_order, slope
from tests.support.worlds import Net, client_data, task

HEAD = 36  # the last weights of the flat vector: 8 × 4 and 4


def batches(data, generator, *, epochs, batch):
    for _ in range(epochs):
        order = torch.randperm(len(data), generator=generator)
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            yield data.features[rows], data.targets[rows]


def ditto(w, data, generator, kept, noise, t, *, local, personal, weight, steps=None):
    """Return one client's uploaded model, and the model that it keeps."""
    u = w
    for x, y in batches(data, generator, epochs=local["epochs"], batch=local["batch"]):
        if steps is None:
            u = u - local["rate"] * slope(u, x, y)
            continue
        total = torch.zeros_like(u)
        for one, label in zip(x.split(1), y.split(1), strict=True):
            g = slope(u, one, label)
            total += g * min(1.0, steps["clip"] / float(g.norm()))
        # Noise of the step's stddev on the model, expressed on the sum of gradients.
        stddev = steps["stddev"] * local["batch"] / local["rate"]
        noised = noise.add_gaussian({"u": total.double()}, stddev)["u"]
        u = u - local["rate"] / local["batch"] * noised.float()
    v = kept.get("v", w)
    for x, y in batches(data, generator, epochs=personal["epochs"], batch=personal["batch"]):
        v = v - personal["rate"] * ((1 - weight / 2) * slope(v, x, y) + weight * (v - w))
    return u, {"v": v}


def pfedme(w, data, generator, kept, noise, t, *, local, attraction, inner_steps, inner_rate):
    personal, theta = w, w
    for x, y in batches(data, generator, epochs=local["epochs"], batch=local["batch"]):
        for _ in range(inner_steps):
            theta = theta - inner_rate * (slope(theta, x, y) + attraction * (theta - personal))
        personal = personal - local["rate"] * attraction * (personal - theta)
    return personal, {"v": theta}


def fedamp(cloud, data, generator, kept, noise, t, *, local, attraction, **server):
    v = kept.get("v", cloud)
    for x, y in batches(data, generator, epochs=local["epochs"], batch=local["batch"]):
        v = v - local["rate"] * (slope(v, x, y) + attraction * (v - cloud))
    return v, {"v": v}


def clouds(models, *, width, step, **client):
    """Return one cloud model for each of ``models``."""
    mixed = []
    for i, personal in enumerate(models):
        shares = [
            0.0 if i == j else step / width * math.exp(-float(((personal - w) ** 2).sum()) / width)
            for j, w in enumerate(models)
        ]
        shares[i] = 1 - sum(shares)
        mixed.append(sum(share * w for share, w in zip(shares, models, strict=True)))
    return mixed


def apple(cores, data, generator, kept, noise, t, *, client, local, rate, penalty, fade):
    cores = list(cores)
    cores[client] = kept.get("core", cores[client])
    n = len(cores)
    p = kept.get("p", torch.full((n,), 1 / n))
    fading = (math.cos(math.pi * (t - 1) / fade) + 1) / 2 if t - 1 < fade else 0.0
    for x, y in batches(data, generator, epochs=local["epochs"], batch=local["batch"]):
        g = slope(sum(share * core for share, core in zip(p, cores, strict=True)), x, y)
        moved = torch.stack([g @ core for core in cores]) + fading * penalty * (p - 1 / n)
        cores[client] = cores[client] - local["rate"] * p[client] * g
        p = p - rate * moved
    v = sum(share * core for share, core in zip(p, cores, strict=True))
    return cores[client], {"core": cores[client], "p": p, "v": v}


def fedala(w, data, generator, kept, noise, t, *, local, rate, share, first):
    personal, weights = kept.get("v"), kept.get("weights")
    start = w
    if personal is not None:
        rows = torch.randperm(len(data), generator=generator)[: round(share * len(data))]
        sample = data.subset(rows.numpy())
        epochs = 1 if weights is not None else first
        weights = torch.ones(HEAD) if weights is None else weights

        def mix():
            return torch.cat([w[:-HEAD], personal[-HEAD:] + (w - personal)[-HEAD:] * weights])

        for x, y in batches(sample, generator, epochs=epochs, batch=local["batch"]):
            step = slope(mix(), x, y)[-HEAD:] * (w - personal)[-HEAD:]
            weights = (weights - rate * step).clamp(0, 1)
        start = mix()
    for x, y in batches(data, generator, epochs=local["epochs"], batch=local["batch"]):
        start = start - local["rate"] * slope(start, x, y)
    kept = {"v": start} if weights is None else {"v": start, "weights": weights}
    return start, kept


METHODS = {"ditto": ditto, "pfedme": pfedme, "fedamp": fedamp, "apple": apple, "fedala": fedala}


def federated(method, *, seed, clients, rounds, clip=None, stddev=None, **numbers):
    """Return the shared model and each client's own model after ``rounds``.

    With ``clip``, uploads are clipped to it and carry noise of ``stddev`` (0 if the steps do).
    """
    initial = task().initial_params(seed)
    w = parameters_to_vector(initial[name] for name, _ in Net().named_parameters())
    known, memory = [w] * clients, [{} for _ in range(clients)]
    received = [w] * clients
    for t in range(1, rounds + 1):
        uploads = []
        for client in range(clients):
            noise = SeededNoise(seed, "client-noise", client, t)
            more = {"client": client} if method == "apple" else {}
            personal, memory[client] = METHODS[method](
                known if method == "apple" else received[client],
                client_data(client).train,
                batch_order(seed, client, t),
                memory[client],
                noise,
                t,
                **more,
                **numbers,
            )
            if clip is not None:
                personal = personal * min(1.0, clip / float(personal.norm()))
                personal = noise.add_gaussian({"u": personal}, stddev)["u"]
            uploads.append(personal)
        known = uploads
        w = sum(known) / clients
        received = clouds(known, **numbers) if method == "fedamp" else [w] * clients
    return w, memory
