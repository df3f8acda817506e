"""An app of a user, as short as `configured` allows."""
