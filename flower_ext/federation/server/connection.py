"""Connect a run to its clients, and find out before round 1 whether they can take part."""

from collections.abc import Mapping
from functools import partial
from logging import getLogger

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from flower_ext.errors import InvalidValue
from flower_ext.federation._flower_private import simulates
from flower_ext.federation.messages import records
from flower_ext.federation.messages.exchange import Content
from flower_ext.federation.messages.for_mods import REHEARSAL
from flower_ext.federation.messages.model_checks import refuse_tied
from flower_ext.federation.messages.replies import read_answer, read_count, read_update
from flower_ext.federation.messages.roster import FederationNotReady, Roster
from flower_ext.federation.method import Connected
from flower_ext.federation.server.run import Run
from flower_ext.federation.server.run_guarantees import summary_of
from flower_ext.privacy import Ledger
from flower_ext.privacy.withdrawal import forgotten, note_forgotten, runs_in

log = getLogger("flwr")


def connect(run: Run, grid: Grid, arrays: ArrayRecord) -> None:
    """Store ``arrays`` as the model to send. At the first call, connect to the clients, too.

    Raise an error if the model does not fit the method, or if the nodes do not fit the plan.
    """
    run.model = run.shared_part(arrays)
    run.clients.grid = grid
    if run.clients.roster.nodes:
        return
    mechanism, method = run.mechanism, run.method
    # A mod can clip and noise one client's update, and nothing else.
    mod = method.any_client_app and mechanism.client_protects and mechanism.release is not None
    leaving = run.population.leaving(run.spending.withdrawn)
    roster = run.clients.connect(grid, run.population.num_nodes, mods=mod, absent=leaving)
    try:
        leave_out_withdrawn(run)
        if roster.foreign:
            _check_foreign(run, mod=mod)
            if mechanism.delta is not None:
                refuse_tied(arrays)
        elif run.options.frozen:
            # Refuse a node whose base model, which no client trains, is not the server's. Simulated
            # nodes share one copy, so ask only one of them.
            nodes = [*run.clients.nodes]
            content = {records.FROZEN: ConfigRecord({"fingerprint": run.options.frozen})}
            questions = dict.fromkeys(nodes[:1] if simulates(grid) else nodes, content)
            run.clients.ask_all(questions, read_answer)
        connected = Connected(
            clients=run.clients,
            summation=run.summation,
            model=run.model,
            generator=run.options.generator,
        )
        # Connect the method first, because it refuses silos whose records name no users. A sum
        # could not count such records.
        run.state = method.connect(connected, run.method_state)
        run.progress.row |= run.summation.connect(run.clients, run.model)
        if mechanism.needs_sizes and run.spending.budget is not None:
            _note_sizes(run)
    except BaseException:
        run.clients.roster = Roster()  # the next call asks again
        raise


def _note_sizes(run: Run) -> None:
    """Note the clients' numbers of examples, on which the next round's ε depends.

    The server asks for them only if the plan does not fix one number for all clients. Their first
    uploads would reveal these numbers anyway. Under a plan that fixes the number, a client that
    cannot load its data uploads like any other, but could not answer this question.
    """
    clients = run.clients
    protection = run.mechanism.protection(summary_of(run), len(clients.nodes))
    if protection is not None and protection.num_examples is not None:
        sizes: Mapping[int, int] = dict.fromkeys(clients.nodes, protection.num_examples)
    else:
        question = {records.SIZE: ConfigRecord()}
        read_size = partial(read_count, name="num-examples")
        sizes = clients.ask_all(dict.fromkeys(clients.nodes, question), read_size)
    for partition, size in sizes.items():
        # The server refuses uploads of a client without examples, so the client counts as one of
        # unknown size.
        if size:
            run.note_size(partition, size)


def leave_out_withdrawn(run: Run) -> None:
    """Forget clients that withdrew, tell them to delete their memory, and ask them nothing else.

    The account notes which clients confirm the deletion; the next run asks the other clients
    again. A silo stays when one of its users withdraws, and leaves the user out of its answers to
    questions.
    """
    account, clients, withdrawn = run.spending.account, run.clients, run.spending.withdrawn
    if run.method.traits.num_silos:
        clients.withdrawn_users = withdrawn
    run.checkpoints.withdrawn = withdrawn
    leaving = run.population.leaving(withdrawn)
    if not leaving:
        return
    if not clients.roster.known:
        raise FederationNotReady(
            f"clients {sorted(leaving)} withdrew, but the nodes do not say which clients they are: "
            "expected a ClientApp with mods=[client_level_dp_mod(), ...] or one built with "
            "client_app(task), and partition-id in each node config"
        )
    # The node may be missing while the state, from a checkpoint, has the uploads of its client.
    run.state = run.method.forget(leaving, run.method_state, run.plan.sampling.population)
    for by_partition in (run.remembered, run.client_metrics):
        for partition in leaving & set(by_partition):
            del by_partition[partition]
    if account is None or not leaving & set(clients.nodes):
        return
    entries = Ledger.read(account)
    remembering = sorted((leaving - forgotten(entries)) & set(clients.nodes))
    if remembering and not clients.roster.foreign:
        runs = sorted({*runs_in(entries), run.checkpoints.run_id})
        content = {records.FORGET: ConfigRecord({"runs": runs})}
        answers = clients.ask(dict.fromkeys(remembering, content), 0, read_answer)
        note_forgotten(account, [partition for partition, _ in answers])
    clients.leave(leaving)


def _check_foreign(run: Run, *, mod: bool) -> None:
    """Refuse a ClientApp of another project if the method or the plan needs one of this package.

    ``mod`` is True if a mod of this package could clip the uploads and add the noise.
    """
    roster, mechanism = run.clients.roster, run.mechanism
    if run.query_sums:
        raise InvalidValue(
            f"queries={[each.query.name for each in run.query_sums]}: expected none, because "
            "the nodes' ClientApp does not use this package and cannot answer a query with noise; "
            "build it with client_app(task)"
        )
    first_error = f" (the first error was: {roster.first_error})" if roster.first_error else ""
    fix = f"build the ClientApp with {type(run.method).__name__}.client_app(task)"
    if not run.method.any_client_app:
        raise FederationNotReady(
            f"the ClientApp does not know {run.method.name}, which trains in its own way on the "
            f"clients: {fix}{first_error}"
        )
    if mechanism.client_protects and not roster.protects:
        mods = (
            "give it mods=[flower_ext.federation.client_level_dp_mod(), ...], with that mod before "
            "all others of ClientApp(mods=...), "
        )
        raise FederationNotReady(
            "under this plan the clients add the noise, but the ClientApp does not know how: "
            f"{mods if mod else ''}{fix}, or take a ReleasePlan with noise_placement='server'"
            f"{first_error}"
        )
    log.info("the ClientApp does not use this package: it gets plain train and evaluate messages")


def rehearse(run: Run, config: ConfigRecord) -> None:
    """Check before round 1 that a ClientApp of another project can train; drop its update.

    A ClientApp cannot train if, for example, it reads a part that no message has, or returns arrays
    under other names. Each round would then spend privacy in vain. One client with unusual data
    must not end a run, so the server asks up to three clients in turn.
    """
    clients, roster = run.clients, run.clients.roster
    if not roster.foreign or run.mechanism.delta is None:
        return
    content: Content = {
        records.MODEL: records.to_record(run.model),
        records.CONFIG: config,
        records.ROUND: ConfigRecord({REHEARSAL: True}),
    }
    trusted = not run.mechanism.client_protects
    rehearsed, reason = set[int](), "no answer"
    for _ in range(3):
        leave_out_withdrawn(run)
        if (partition := next((p for p in clients.nodes if p not in rehearsed), None)) is None:
            break
        rehearsed.add(partition)
        messages = clients.messages("train", {partition: content}, 1)
        for reply in clients.replies(messages.values()):
            try:
                read_update(reply, base=run.model, trust_models=trusted)
            except Exception as error:  # whatever a reply provokes
                reason = str(error)
            else:
                return
    mods = (
        ". If another mod stands before client_level_dp_mod in ClientApp(mods=...), put "
        "client_level_dp_mod first: an earlier mod finds no metrics, and must not change an upload"
    )
    raise FederationNotReady(
        f"the ClientApp cannot take part: none of {len(rehearsed)} clients returned a "
        f"usable update for the rehearsal ({reason}). No round began, and no "
        f"privacy was spent{mods if roster.protects else ''}"
    )
