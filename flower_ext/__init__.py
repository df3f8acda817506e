"""Private and personalised federated learning for Flower."""


def __getattr__(name: str) -> str:
    """Return ``__version__``, read from the installed package when somebody asks for it.

    An import never reads it: Flower's simulation changes ``sys.path`` in one thread while another
    one imports apps, and the search for the package may then miss it.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("flower-ext")
