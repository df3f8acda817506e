"""Machine code that trains dense and convolutional networks, for flower_ext."""
