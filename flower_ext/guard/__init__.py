"""A guard: a process of the site that runs Flower apps and bounds what leaves in their replies.

The guard takes the place of ``flwr-clientapp`` on a node. It holds the node's token and network,
and runs each app in a child process that has neither. Import names from the modules: the child must
start without importing PyTorch or the rest of this package.
"""
