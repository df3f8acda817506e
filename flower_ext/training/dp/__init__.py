"""Training under clipped gradients of single examples."""
