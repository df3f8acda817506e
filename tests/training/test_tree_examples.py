"""A model of several inputs trains and is scored as the same model of one packed tensor."""

import math
from collections import namedtuple
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from flower_ext.data import Examples, SiloData
from flower_ext.errors import InvalidValue
from flower_ext.training import (
    Job,
    LocalTraining,
    Proximal,
    accuracy,
    attempt_groups,
    evaluate,
    scoring,
    train_groups,
)
from tests.support.jobs import (
    SGD,
    WAYS,
    evaluate_each,
    one_by_one,
    problem,
    same,
    train_many,
    why_apart,
)
from tests.support.trees import (
    FORMS,
    OWN_LOSS,
    PACKED,
    PARTED,
    Output,
    Sentences,
    as_mapping,
    as_tuple,
    of_output,
    packed,
    with_labels,
)


def job(data, training=SGD, seed=1):
    start = PACKED.initial_params(seed)
    terms = [Proximal(weight=0.1, anchor=PACKED.initial_params(9))]
    draws = torch.Generator().manual_seed(seed)
    return Job(params=start, examples=data, training=training, generator=draws, terms=terms)


def trained(task, job):
    (model,) = one_by_one(task, [job])
    return model


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_tree_trains_to_the_bits_of_a_packed_tensor(which, way):
    task, form = FORMS[which]
    ours = trained(task, job(form(packed(21)), WAYS[way][0]))
    theirs = trained(PACKED, job(packed(21), WAYS[way][0]))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    moved = any(not torch.equal(p, PACKED.initial_params(1)[n]) for n, p in ours.items())
    assert moved or way == "nothing to do"


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_many_trees_train_as_packed_tensors_in_a_batch(which, batch_invariant):
    task, form = FORMS[which]
    sizes = [16, 9, 16, 16, 3, 16, 16]
    jobs = [job(form(packed(size, size)), seed=k) for k, size in enumerate(sizes)]
    theirs = [job(packed(size, size), seed=k) for k, size in enumerate(sizes)]
    trained_models = train_groups(task, jobs, batch_invariant=batch_invariant)
    ours = {group[0]: {n: p[0] for n, p in rows.items()} for group, rows in trained_models}
    same([ours[index] for index in range(len(sizes))], train_many(PACKED, theirs))


def test_trees_are_grouped_by_form_whatever_the_order_of_their_names():
    tokens, mask = packed(4).features.unbind(1)
    targets = torch.zeros(4, dtype=torch.long)
    several = [
        Examples({"tokens": tokens, "mask": mask}, targets),
        Examples({"mask": mask, "tokens": tokens}, targets),
        Examples({"mask": mask[:, :3], "tokens": tokens[:, :3]}, targets),
        Examples((tokens, mask), targets),
        packed(4),
    ]
    row_types = [data.row_type for data in several]
    assert [row_types.index(kind) for kind in row_types] == [0, 0, 2, 3, 4]


def test_why_trees_train_apart_is_said():
    data = packed(4)
    assert why_apart(PARTED, [job(as_tuple(data))]) == "features are not a single tensor"
    aims = replace(data, targets={"label": data.targets})
    assert why_apart(PACKED, [job(aims)]) == "targets are not a single tensor"


def test_users_of_a_silo_train_on_separate_rows():
    data, owners = packed(30), torch.arange(30) % 4
    silo = SiloData(train=as_mapping(data), test=as_mapping(packed(2)), owners=owners)
    by_user = silo.by_user()
    jobs = [job(examples, seed=user) for user, examples in by_user.items()]
    for (user,), rows in train_groups(PARTED, jobs, batch_invariant=True):
        examples = data.subset(np.flatnonzero(owners == user))
        expected = trained(PACKED, job(examples, seed=user))
        assert all(torch.equal(rows[name][0], p) for name, p in expected.items())


@pytest.mark.parametrize("odd", ["a label out of range", "a name that is missing"])
def test_a_user_whose_tree_raises_moves_no_other_by_a_bit(odd):
    def models(wrong):
        users = [as_mapping(packed(6, seed)) for seed in range(5)]
        if wrong and odd == "a label out of range":
            users[2].targets[1] = 99
        elif wrong:
            users[2] = Examples({"tokens": users[2].features["tokens"]}, users[2].targets)
        jobs = [job(user_data, seed=user) for user, user_data in enumerate(users)]
        solve = partial(train_groups, PARTED, batch_invariant=True)
        outcomes = attempt_groups(solve, jobs)
        return {user: rows for group, rows in outcomes for user in group}

    ours, theirs = models(True), models(False)
    assert isinstance(ours.pop(2), Exception)
    assert sorted(ours) == [0, 1, 3, 4]
    for user, rows in ours.items():
        torch.testing.assert_close(rows, theirs[user], rtol=0, atol=0)


def test_the_exact_minimiser_of_a_tree_is_that_of_a_packed_tensor():
    exact = LocalTraining(tolerance=1e-9, proximal_weight=1.0)
    ours = trained(PARTED, job(as_mapping(packed(12)), exact))
    theirs = trained(PACKED, job(packed(12), exact))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


class Overwriting(Sentences):
    def forward(self, tokens, mask):
        return super().forward(tokens.remainder_(7), mask.mul_(0))


def test_a_model_that_writes_into_its_inputs_leaves_trees_unchanged():
    data = as_mapping(packed(8))
    before = {name: leaf.clone() for name, leaf in data.features.items()}
    task = problem(Overwriting)
    smaller_job = replace(job(data), training=replace(SGD, batch_size=100))
    trained(task, smaller_job)
    evaluate(task, smaller_job.params, data)
    torch.testing.assert_close(data.features, before, rtol=0, atol=0)


def total(outputs, targets):
    """Return the sum of the losses of two heads with a target each."""
    return sum(cross_entropy(outputs[name], targets[name]) for name in targets)


class TwoHeads(Sentences):
    def forward(self, tokens, mask):
        logits = super().forward(tokens, mask)
        return {"label": logits, "again": -logits, 3: None}


def test_targets_may_be_a_mapping_as_outputs_may(monkeypatch):
    data = packed(9)
    aims = {"label": data.targets, "again": data.targets.flip(0)}
    task = replace(problem(TwoHeads, total), metrics={})
    examples = job(Examples(as_tuple(data).features, aims))

    model = trained(task, examples)
    outputs = torch.func.functional_call(PACKED.model(), model, (data.features,))
    expected = cross_entropy(outputs, aims["label"]) + cross_entropy(-outputs, aims["again"])
    for size in (1024, 4):
        monkeypatch.setattr(scoring, "_ROWS", size)
        scores = evaluate(task, model, examples.examples)
        assert scores["loss"] == pytest.approx(float(expected))
    assert scores["loss"] < evaluate(task, examples.params, examples.examples)["loss"]


@pytest.mark.parametrize("which", FORMS)
def test_a_tree_is_scored_as_a_packed_tensor(which):
    task, form = FORMS[which]
    models = [PACKED.initial_params(seed) for seed in (1, 2, 3)]
    models[2] = models[0]
    data = [packed(size, size) for size in (7, 12, 5)]
    theirs = evaluate_each(PACKED, models, data)
    ours = evaluate_each(task, models, [form(examples) for examples in data])
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other)
        assert set(one) == {"loss", "accuracy"}


@dataclass
class Found:
    logits: torch.Tensor
    aside: list


Named = namedtuple("Named", ["aside", "logits"])
MAKERS = {
    "dataclass": lambda logits: Found(logits=logits, aside=[logits.exp()]),
    "ModelOutput": lambda logits: Output(logits=logits, hidden=(logits, 2 * logits)),
    "named tuple": lambda logits: Named(aside=None, logits=logits),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("size", [1024, 4, 1])
def test_outputs_of_mini_batches_are_joined_in_the_models_type(kind, size, monkeypatch):
    class Model(Sentences):
        def forward(self, tokens, mask):
            return MAKERS[kind](super().forward(tokens, mask))

    seen = []

    def read(outputs, targets):
        seen.append(outputs)
        return accuracy(outputs.logits, targets)

    task = replace(problem(Model, of_output(cross_entropy)), metrics={"accuracy": read})
    data, params = packed(10), PACKED.initial_params(1)
    expected = evaluate(PACKED, params, data)
    monkeypatch.setattr(scoring, "_ROWS", size)
    assert evaluate(task, params, as_mapping(data)) == pytest.approx(expected)
    (outputs,) = seen
    assert type(outputs) is type(MAKERS[kind](torch.zeros(1, 3)))
    if kind == "ModelOutput":
        assert list(outputs) == ["logits", "hidden"]
        assert outputs.loss is None
        assert torch.equal(outputs["hidden"][1], 2 * outputs.logits)


def test_an_output_without_one_row_per_example_is_named_when_joined(monkeypatch):
    data, params = with_labels(packed(10)), PACKED.initial_params(1)
    whole = evaluate(OWN_LOSS, params, data)
    assert set(whole) == {"loss", "accuracy"}
    monkeypatch.setattr(scoring, "_ROWS", 4)
    message = r"outputs\['loss'\] of shape \(\) for a mini-batch of 4 examples: .* such as logits"
    with pytest.raises(InvalidValue, match=message):
        evaluate(OWN_LOSS, params, data)
    logits_alone = replace(OWN_LOSS, loss=of_output(cross_entropy))
    assert evaluate(logits_alone, params, as_mapping(packed(10))) == pytest.approx(whole)


def test_an_error_of_one_client_of_trees_concerns_no_other():
    params, trees = PACKED.initial_params(1), as_mapping(packed(4))
    wrong = Examples({"words": trees.features["tokens"]}, trees.targets)
    mislabelled = replace(trees, targets=trees.targets + 7)
    scores = evaluate_each(PARTED, [params] * 4, [trees, wrong, mislabelled, trees])
    assert scores[0] == scores[3] == evaluate(PARTED, params, trees)
    assert "unexpected keyword argument 'words'" in str(scores[1])
    assert math.isnan(scores[2]["loss"])
    assert scores[2]["accuracy"] == 0


def test_accuracy_of_an_object_says_what_to_name():
    outputs, data = Output(logits=torch.zeros(4, 3)), packed(4)
    with pytest.raises(InvalidValue, match="outputs of type Output: .*accuracy.outputs.logits"):
        accuracy(outputs, data.targets)
