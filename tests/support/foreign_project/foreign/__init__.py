"""A Flower project that did not use flower_ext before its strategy was exchanged."""
