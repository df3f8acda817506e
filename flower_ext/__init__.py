"""Private and personalised federated learning for Flower."""

from importlib.metadata import version

__version__ = version("flower-ext")
