"""Time and memory of rounds and trainings, beside other programs.

| modules | what they are |
| --- | --- |
| ``__main__``, ``trainings``, ``memory``, ``dp_sgd``, ``language`` | experiments |
| ``ours``, ``plain_pytorch``, ``flower_fedavg``, ``pfl_research`` | programs that are compared |
| ``synthetic_updates`` | program of ``memory``: clients answer without training |
| ``contest``, ``turns``, ``growth`` | harness: processes in turn, their best, and larger sizes |
| ``workload``, ``texts`` | inputs: models, images and texts |
"""
