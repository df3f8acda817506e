"""DP-SGD: training that clips the gradient of each example."""
