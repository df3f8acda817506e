"""Trials of a model and its loss on made-up examples, before real data are touched.

They find out whether one example can change what other examples contribute. Clipping each
contribution does not bound such a change. `trial_examples` makes random and unusual examples that
reveal nobody's values; `snapshots` reads all that a model can keep. A trial that finds nothing is
evidence and no proof.

Refused under DP-SGD (by `ClippedGradient`):

* layers that mix examples: batch normalisation, and tables with ``max_norm``
  (`model_of_single_examples`; tests in ``dp/test_dp_sgd.py`` and ``dp/test_opacus.py``);
* a model or a loss that changes while an example passes, except for buffers
  (`require_single_examples`; ``trials/test_between_examples.py``);
* a model or a loss that learns from no example by itself: each raises, as for labels that do not
  begin at 0, or has a gradient of zero, or one that is not finite, or all outputs are equal
  (`require_single_examples`; ``trials/test_single_examples.py``).

Refused wherever uploads are protected:

* a model or a loss that changes in training what other models see, such as a class or a global
  variable, or that draws from the global generators of NumPy or Python
  (`refuse_state_between_trainings`; ``test_between_trainings.py``).

Not refused, but trained in a slower way in which no example meets another:

* by vmap, a model that reads values of its features (`control_flow.watched`), or that mixes the
  examples of a batch (`BatchInvarianceTrial.finds_own_gradients`);
* one by one, a model in which an example is rounded by its place in the batch or by other examples,
  even under vmap (`BatchInvarianceTrial.is_batch_invariant`).
"""
