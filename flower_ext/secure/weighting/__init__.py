"""Σ_s Σ_u (n_su / N_u) Δ_su + z_s, without anyone learning how many records a user has where.

Source: Protocol 1 of Kato et al., "Uldp-FL" (PVLDB 2024), for honest-but-curious parties that do
not collude.

====================  =====================================================================
paper                 here
====================  =====================================================================
n_su, N_u, N_max      ``counts``, their sum over silos, ``max_records_per_user``
C_LCM                 `WeightingSettings.common_multiple`
R, r_u                the silos' seed; `user_blinds`
Δ̃^{s,u}, z_s          ``updates``, ``noise``
P                     `WeightingSettings.precision`, of the whole sum
====================  =====================================================================

Where this departs from the paper:

* Silos number the users in an order that the server does not know.
* A silo's sum is masked by units modulo n² that multiply to one over the silos, instead of by
  numbers modulo n that add to zero. One such mask hides message *and* randomness of a ciphertext,
  so a single upload is uniform.
* When no users are drawn, every round sends the same encryptions, and silos keep what they computed
  from them. When users are drawn, they are fresh.
* The product of all uploads is a ciphertext whose randomness the server could otherwise predict for
  any guess of the updates, having made the encryptions. So each ciphertext is re-randomised, each
  by one silo, in turn.
* A silo adds a dither to its noise: uniform over one step of the encoding. The paper's noise is a
  multiple of C_LCM, so the decrypted sum modulo C_LCM would be that of the updates alone, and its
  greatest common divisor with C_LCM would show factors of the N_u. With the dither it is uniform.

* Users may be drawn so that no party knows whom: for each user the server encrypts k times the
  weight and P - k times zero, and the silos take one of these P by oblivious transfer, all of them
  the same one, by a choice that they derive from their seed. In the paper each silo would choose
  for itself, and a user's weights no longer add up.

What the server learns: the noisy sum; how many users have no record at all (their blinded total is
zero), but not which; and, when it draws users itself, which places of the secret order it drew.
What a silo learns: nothing about other silos. A silo spends its time on the users that it has; who
times it learns about how many these are.

`WeightingServer` and `WeightingSilo` are the parties, with the steps of the protocol as methods in
order; `messages` is what passes between them. Nothing here knows torch or Flower.
"""

try:
    import gmpy2 as _gmpy2  # noqa: F401
    import phe as _phe  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"flower_ext.secure.weighting needs {error.name}: pip install 'flower-ext[weighting]'",
        name=error.name,
    ) from error
