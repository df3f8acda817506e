"""The commands ``flower-ext link``, ``stats`` and ``study``."""
