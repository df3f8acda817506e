"""An app of one's own, as short as the helper makes it."""
