"""The laboratory: experiments that make the numbers of the documentation, and tests of the tests.

``python -m benchmarks`` lists the experiments. The package does not import this folder.

| folder or module | what is there |
| --- | --- |
| ``runs``, ``command_line`` | harness: an app's runs that are kept, and command lines |
| ``report``, ``results`` | rows of finished runs, and the documentation's tables made of them |
| ``dp2_fedsam``, ``ditto``, ``uldp``, ``upcycled`` | the papers' tables and figures |
| ``correlated``, ``finetuning``, ``mechanisms``, ``sharing`` | methods beside one another |
| ``released_statistics``, ``study`` | statistics of a consortium |
| ``weighting``, ``secure_sum``, ``guard`` | costs of private weights, secure sums and the guard |
| ``speed`` | time and memory of rounds and trainings, beside other programs |
| ``bounds`` | the papers' convergence theorems, which only tests evaluate |
| ``mutants``, ``faults`` | tests of the tests: faults planted in the code, and in whole runs |
"""
