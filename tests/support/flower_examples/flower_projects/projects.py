"""The ClientApp of each project, with more mods before its own."""

import time

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch.optim import SGD

from flower_projects.task import answer, evaluate, load_data, one_epoch, received, train_fn

scalars: list[dict] = []
"""Lines of `scalars_mod`: one a training."""


def quickstart(*mods) -> ClientApp:
    """A CNN in plain PyTorch; the server's configuration has the learning rate."""
    return _app(_trains, mods)


def custom_mods(*mods) -> ClientApp:
    """The same, with mods that follow each training and change its configuration."""
    return _app(_trains, [*mods, scalars_mod, slower_mod])


def opacus(*mods, wrapped: bool = False) -> ClientApp:
    """DP-SGD on the clients, each with its own noise, and its ε as a metric."""
    from opacus import PrivacyEngine  # takes a second, which the other projects need not wait

    def train(message: Message, context: Context) -> Message:
        net, loader = received(message), load_data(context)
        odd = int(context.node_config["partition-id"]) % 2
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, batches = engine.make_private(
            module=net,
            optimizer=SGD(net.parameters(), lr=float(message.content["config"]["lr"])),
            data_loader=loader,
            noise_multiplier=1.5 if odd else 1.0,
            max_grad_norm=1.0,
        )
        one_epoch(model, optimizer, batches)
        state = (model if wrapped else net).state_dict()
        epsilon = float(engine.get_epsilon(delta=1e-5))
        return answer(message, state, epsilon=epsilon, **{"num-examples": len(loader.dataset)})

    return _app(train, mods)


def scalars_mod(message: Message, context: Context, call_next) -> Message:
    """Write down the metrics of a training, its round, and how long it took."""
    if message.metadata.message_type != "train":
        return call_next(message, context)
    step, start = message.content["config"]["server-round"], time.perf_counter()
    sizes = [array.numpy().size for array in message.content["arrays"].values()]
    reply = call_next(message, context)
    metrics = dict(reply.content["metrics"])
    took = time.perf_counter() - start
    scalars.append({"step": step, "took": took, "numbers": sum(sizes), **metrics})
    return reply


def slower_mod(message: Message, context: Context, call_next) -> Message:
    """Halve the learning rate of a training."""
    if message.metadata.message_type == "train":
        message.content["config"]["lr"] *= 0.5
    return call_next(message, context)


def _trains(message: Message, context: Context) -> Message:
    net, loader = received(message), load_data(context)
    loss = train_fn(net, loader, float(message.content["config"]["lr"]))
    metrics = {"train_loss": loss, "losses": [loss], "num-examples": len(loader.dataset)}
    return answer(message, net.state_dict(), **metrics)


def _app(train, mods) -> ClientApp:
    app = ClientApp(mods=list(mods))
    app.train()(train)
    app.evaluate()(evaluate)
    return app
