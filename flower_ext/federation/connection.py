"""Connect a run to its clients, and find out before its first round if they can take part."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from flower_ext.errors import InvalidValue
from flower_ext.federation import records
from flower_ext.federation._flower_private import in_simulation, record_of
from flower_ext.federation.method import Connected
from flower_ext.federation.roster import refuse_foreign
from flower_ext.federation.run import Run
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.training import matches


def shared_part(run: Run, arrays: ArrayRecord) -> ArrayRecord:
    """Return the part of a model that clients share.

    Raises
    ------
    InvalidValue
        Every parameter is personal.
    """
    personal = run.method.personal
    shared = {name: array for name, array in arrays.items() if not matches(name, personal)}
    if not shared:
        raise InvalidValue(f"personal={personal}: expected at least one shared parameter")
    return record_of(ArrayRecord, shared)


def connect(run: Run, grid: Grid, arrays: ArrayRecord) -> None:
    """Take ``arrays`` as the model to send; the first time, connect to the clients.

    Raises
    ------
    FederationNotReady
        The connected nodes are not those that the plan counts on, or cannot take part.
    InvalidValue
        The model does not fit the method, or the clients do not fit the plan.
    """
    run.model = records.shared_arrays(shared_part(run, arrays))
    run.method.check_model(run.model)
    is_new = run.exchange.roster is None
    _meet(run, grid)
    roster = run.exchange.roster
    if is_new and roster is not None and roster.foreign and run.mechanism.delta is not None:
        records.refuse_tied(arrays)


def _meet(run: Run, grid: Grid) -> None:
    """Connect to the clients, at the first call, and let method and sums ask what they need."""
    if run.exchange.roster is not None:
        return
    mechanism, method = run.mechanism, run.method
    mod = method.any_client_app and mechanism.client_protects and mechanism.release is not None
    roster = run.exchange.connect(grid, run.population.num_nodes, mods=mod)
    try:
        if roster.foreign:
            _check_foreign(run, mod=mod)
        elif run.frozen:
            _check_frozen(run, grid)
        clients = run.clients(grid)
        connected = Connected(
            clients=clients,
            summation=run.summation,
            model=run.model,
            generator=run.generator,
        )
        run.state = method.connect(connected, run.method_state)
        run.progress.row |= run.summation.connect(clients, run.model)
        if run.mechanism.needs_sizes and run.spending.budget is not None:
            _ask_sizes(run, grid)
    except BaseException:
        run.exchange.roster = None  # the next call asks again
        raise


def _check_foreign(run: Run, *, mod: bool) -> None:
    """Refuse a ClientApp from elsewhere if the method or the plan needs one of this package."""
    roster, mechanism = run.exchange.roster, run.mechanism
    assert roster is not None
    if isinstance(mechanism, NoisedSum) and mechanism.secure_sum:
        raise InvalidValue(
            "noise_placement=SecureSum(…): expected 'client' or 'server', because the nodes' "
            "ClientApp does not use this package and cannot mask its uploads; build it by "
            "client_app(task)"
        )
    refuse_foreign(
        run.method.name,
        roster.said,
        any_client_app=run.method.any_client_app,
        client_protects=mechanism.client_protects and not roster.protects,
        mod=mod,
    )


def _check_frozen(run: Run, grid: Grid) -> None:
    """Ask nodes if they have the server's base model.

    Simulated nodes share one copy, so asking one of them is enough.
    """
    nodes = [*run.exchange.nodes]
    content = {records.FROZEN: ConfigRecord({"fingerprint": run.frozen})}
    questions = dict.fromkeys(nodes[:1] if in_simulation() else nodes, content)
    run.exchange.query(grid, questions, records.read_answer)


def _ask_sizes(run: Run, grid: Grid) -> None:
    """Ask clients for their numbers of examples, which the next round's ε depends on.

    Their first uploads would reveal these numbers anyway.
    """
    content = {records.ROUND: run.round_record(0, **{"report-size": True})}
    everyone = dict.fromkeys(run.exchange.nodes, content)
    answers = run.exchange.query(grid, everyone, records.read_answer)
    run.num_examples |= {p: int(answer["num-examples"]) for p, answer in answers.items()}


def rehearse(run: Run, grid: Grid, config: ConfigRecord) -> None:
    """Find out if a ClientApp of another project can train, before its rounds cost privacy.

    Raises
    ------
    FederationNotReady
        No client could train.
    """
    roster = run.exchange.roster
    if roster is not None and roster.foreign and run.mechanism.delta is not None:
        trusted = not run.mechanism.client_protects
        run.exchange.rehearse(
            grid,
            {records.MODEL: records.to_record(run.model), records.CONFIG: config},
            lambda reply: records.read_update(reply, base=run.model, trust_models=trusted),
        )
