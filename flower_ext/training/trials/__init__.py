"""Trials of a model and its loss on made-up examples, before real data are touched.

Trials find out whether one example can change what other examples contribute. Clipping each
contribution does not bound such a change. The examples are random or unusual, and reveal nobody's
values. A trial that finds nothing is evidence, not a proof.

=======================  ====================================  ==================================
module                   fault that its trial finds            what the package then does
=======================  ====================================  ==================================
`single_examples`        A model cannot learn from one         `ClippedGradient` refuses the
                         example alone, or remembers an        model.
                         example outside its buffers.
`batch_invariance`       A gradient in a batch differs from    `dp.ways` computes the gradients
                         the example's own gradient, beyond    by vmap, or one by one.
                         rounding or in any bit.
`control_flow`           Feature values decide which           `dp.one_pass` does not pass
                         operations the model runs.            examples together.
`joint_trainings`        Jobs that train together end with     `batched.choice` trains the jobs
                         other models than alone, beyond       in another form.
                         rounding or in any bit.
`between_trainings`      A training changes something that     The client refuses to train under
(in `training`)          a later training sees.                a plan that promises privacy.
=======================  ====================================  ==================================

All trials use three modules: `trial_examples` makes the examples, `snapshots` reads everything that
a model can store, and `training_kind` is the key under which the process remembers an answer. Some
layers, such as batch normalisation, are known to mix examples. They need no trial, because
`model_of_single_examples` refuses them.
"""
