"""Trials of a model and its loss on made-up examples, before real data are touched.

Trials find out whether one example can change what other examples contribute. Clipping each
contribution does not bound such a change. The examples are random or unusual, and reveal nobody's
values. A trial is a function or a method ``why_...``. It returns the reason why the package refuses
the model or takes a slower way; it returns None if it finds no reason. None is evidence, not a
proof.

A trial tests whether one example changes another, or whether one training changes another. One may
follow the other, or both may be computed together. Each case has its module:

===============  =====================  ========================
pairs of         one follows the other  both computed together
===============  =====================  ========================
examples         `examples_in_turn`     `examples_together`
trainings        `trainings_in_turn`    `trainings_together`
===============  =====================  ========================

======================  ====================================  ==================================
module                  fault that its trial finds            what the package then does
======================  ====================================  ==================================
`examples_in_turn`      A model remembers an example outside  `ClippedGradient` refuses the
                        its buffers.                          model.
`lone_examples`         A model cannot learn from one         `ClippedGradient` refuses the
                        example alone.                        model.
`examples_together`     A gradient in a batch differs from    `dp.ways` computes the gradients
                        the example's own gradient, beyond    by vmap, or one by one.
                        rounding or in any bit.
`control_flow`          Feature values decide which           `dp.ways` computes the gradients
                        operations the model runs.            by vmap, or one by one.
`trainings_in_turn`     A training changes something that     The client refuses to train under
                        a later training sees.                a plan that promises privacy.
`trainings_together`    A job that trains together with       `batched.choice` trains the jobs
                        others ends with another model than   in another form.
                        alone, beyond rounding or in any bit.
======================  ====================================  ==================================

`control_flow` returns no reason: it raises an error, which stops the pass at once.

The trials share three modules. `made_up_examples` makes the examples. `snapshots` reads all that a
model can store. `training_kind` makes the keys under which the process remembers the results.
Some layers, such as batch normalisation, are known to mix examples. They need no trial, because
`model_of_single_examples` refuses them.
"""
