"""The client side that all methods share: requests, local training, protection, replies."""
