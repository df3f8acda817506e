"""The loss and the gradient of single examples, alone or in one pass over a batch."""
