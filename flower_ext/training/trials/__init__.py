"""Trials of a model and its loss on made-up examples, before real data are touched.

Trials find out whether one example can change what other examples contribute. Clipping each
contribution does not bound such a change. The examples are random or unusual, and reveal nobody's
values. Each trial is a function ``why_...``, which returns the reason for a refusal or for a slower
way, or None if it finds none. None is evidence, not a proof.

======================  ============================  ===============================
may one change another  if they follow one another?   if they are computed together?
======================  ============================  ===============================
example                 `examples_in_turn`            `examples_together`
training                `trainings_in_turn`           `trainings_together`
======================  ============================  ===============================

======================  ===================================================================
module                  what follows from a reason
======================  ===================================================================
`examples_in_turn`      `ClippedGradient` refuses the model, because the model keeps
                        something of an example other than in buffers.
`lone_examples`         The same, because no example alone teaches the model anything.
`examples_together`     `dp.ways` finds the gradients by vmap, or one by one, because those
                        of a pass differ from those that each example has alone.
`control_flow`          The same: the model's operations depend on values of features. It
                        is a watch that raises an error, to stop the pass at once.
`trainings_in_turn`     The client refuses to train under a plan that protects.
`trainings_together`    `batched.choice` trains the jobs in another form.
======================  ===================================================================

All trials use `made_up_examples`; `training_kind`, under which the process remembers a reason; and
`snapshots`, which reads everything that a model can store. Layers that are known to mix examples,
such as batch normalisation, need no trial, because `model_of_single_examples` refuses them.
"""
