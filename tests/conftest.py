"""Settings for all tests."""

import torch

# Tests run side by side and their models are tiny: more threads would only wait for one another.
torch.set_num_threads(1)
