"""The server's secret key s and its public key (pk0, pk1) = (e - pk1 · s, pk1).

The polynomial pk1 is uniform and follows from a public seed. The coefficients of e are small.
"""

import numpy as np

from flower_ext.secure.keys_and_ciphers import derive
from flower_ext_lattice import ring
from flower_ext_lattice.layout import DEGREE
from flower_ext_lattice.ring import PRIMES, Reals
from flower_ext_lattice.samplers import Stream, public_polynomial


class SecretKey:
    """The transforms of the server's secret polynomial s, with coefficients −1, 0 and 1.

    ``seed`` (32 bytes) determines s.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        secret = Stream(derive(seed, "secret")).ternary(DEGREE)
        self.transforms: Reals = np.stack(
            [ring.transformed(secret[None], prime)[0] for prime in range(len(PRIMES))]
        )

    def encryptions(self, masks: Reals, errors: Reals) -> Reals:
        """Return the polynomials errors - masks · s, as nonnegative residues (2, count, DEGREE).

        Parameters
        ----------
        masks : float64 (2, count, DEGREE)
            Transforms of uniform polynomials.
        errors : float64 (count, DEGREE)
        """
        encryptions = np.empty(masks.shape)
        for prime, modulus in enumerate(PRIMES):
            product = ring.multiplied(masks[prime], self.transforms[prime], prime)
            encryptions[prime] = np.mod(errors - ring.inverted(product, prime), modulus.q)
        return encryptions

    def public_words(self, public_seed: bytes) -> bytes:
        """Return the words of pk0 = e - pk1 · s, with the pk1 that follows from ``public_seed``."""
        errors = Stream(derive(self._seed, "error")).errors(DEGREE).astype(np.float64)
        masks = public_polynomial(public_seed, "key")[:, None]
        return ring.to_words(self.encryptions(masks, errors[None]))


def public_key(public_seed: bytes, words: bytes) -> Reals:
    """Return the transforms (2 primes, 2 parts, DEGREE) of pk0 and pk1.

    Raises
    ------
    ValueError
        A residue is not below its prime.
    """
    first = ring.from_words(words, (2, 1, DEGREE), name="public key")
    pair: Reals = key_pairs(first, public_polynomial(public_seed, "key")[:, None])[0]
    return pair


def key_pairs(first: Reals, second: Reals) -> Reals:
    """Return pairs of polynomials in the form of ``multipliers`` of `ring.add_products`.

    The result holds reduced transforms, (count, 2 primes, 2 parts, DEGREE).

    Parameters
    ----------
    first : float64 (2, count, DEGREE)
        Residues of the first polynomial of each pair.
    second : float64 (2, count, DEGREE)
        Residues of the transform of the second polynomial of each pair.
    """
    pairs = np.empty((first.shape[1], 2, 2, DEGREE))
    for prime in range(len(PRIMES)):
        pairs[:, prime, 0] = ring.transformed(first[prime], prime)
        residues = second[prime].reshape(-1).copy()
        ring.reduce(residues, prime)
        pairs[:, prime, 1] = residues.reshape(second[prime].shape)
    return pairs
