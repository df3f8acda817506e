"""Trials of a model and its loss on made-up examples, before real data are touched.

Trials find out whether one example can change what other examples contribute. Clipping each
contribution does not bound such a change. The examples are random or unusual, and reveal nobody's
values. A trial that finds nothing is evidence, not a proof.

=======================  =================================  =====================================
module                   its question                       what follows from "no"
=======================  =================================  =====================================
`single_examples`        Does the model learn from one      `ClippedGradient` refuses the model.
                         example at a time, and keep
                         nothing of it but buffers?
`batch_invariance`       Is each gradient of a batch the    `dp.ways` finds the gradients by vmap,
                         one that the example has alone,    or one by one.
                         up to rounding, or to the bit?
`control_flow`           Do the model's operations stay     `dp.one_pass` does not pass examples
                         the same for all feature values?   together.
`joint_trainings`        Do jobs that train together end    `batched.choice` trains them in
                         as each alone, up to rounding,     another form.
                         or to the bit?
`between_trainings`      Does a training leave nothing      The client refuses to train under a
(in `training`)          that another training sees?        plan that protects.
=======================  =================================  =====================================

All trials use `trial_examples`, which makes the examples; `training_kind`, under which the process
remembers an answer; and `snapshots`, which reads everything that a model can store. Layers that are
known to mix examples, such as batch normalisation, need no trial, because
`model_of_single_examples` refuses them.
"""
