"""Trials of a model and its loss on made-up examples, before real data are touched.

Trials find out whether one example can change what other examples contribute. Clipping each
contribution does not bound such a change. The examples are random or unusual, have only the shapes
and types of real ones, and reveal nobody's values. A trial is a function or a method ``why_...``.
It returns the reason why the package refuses the model or takes a slower way; it returns None if it
finds no reason. The result None is evidence, not a proof.

=====================  ====================================  ====================================
module                 fault that its trials find            what the package then does
=====================  ====================================  ====================================
`examples_in_turn`     A model remembers an example outside  `ClippedGradient` refuses the model.
                       its buffers, or cannot learn from
                       one example alone.
`examples_together`    An example's gradient in a batch      `dp.passes` computes the gradients
                       differs from its gradient alone by    by vmap, or one by one.
                       more than rounding, or some of its
                       bits depend on other examples.
`single_rows`          A model refuses a mini-batch with a   `local` lets the last mini-batches
                       single row.                           share their rows.
`trainings`            A training changes something that     The client refuses to train under a
                       a later training sees.                plan that promises privacy.
`trainings`            A job that trains with others ends    `batched.many` trains the jobs in
                       with a model that differs by more     another form.
                       than rounding from the one it gets
                       alone, or some bits of its model
                       depend on the other jobs.
=====================  ====================================  ====================================

`made_up_examples` makes the examples, and `snapshots` finds what a model stores. Layers that
are known to mix examples need no trial: `model_of_single_examples` refuses them.
"""
