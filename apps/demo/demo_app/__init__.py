"""One Flower app: clients train alone, together with privacy, or together without privacy."""
