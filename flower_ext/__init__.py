"""Private and personalised federated learning for Flower."""


def __getattr__(name: str) -> str:
    """Return ``__version__``, read from the installed package when the name is used.

    Reading it at import could fail, because Flower's simulation changes ``sys.path`` in one thread
    while another thread imports apps.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("flower-ext")
