"""Private weighting: the sum Σ_s Σ_u (n_su / N_u) Δ_su + z_s, with record counts kept secret.

No party learns how many records a user has in a silo other than its own. Source: Protocol 1 of Kato
et al., "Uldp-FL" (PVLDB 2024), for honest-but-curious parties that do not collude.

====================  =====================================================================
paper                 here
====================  =====================================================================
n_su, N_u, N_max      ``counts``, their sum over silos, ``max_records_per_user``
C_LCM                 `PaillierSettings.common_multiple`
R, r_u                the silos' seed; `user_blinds`
Δ̃^{s,u}, z_s          ``updates``, ``noise``
P                     `PaillierSettings.precision`, for the whole sum over all silos
====================  =====================================================================

This package departs from the paper in six points:

* The silos number the users in an order that the server does not know.
* The silos derive their seed from random bytes of silo 0 and from the server's key, so that silo 0
  alone cannot choose it.
* A silo masks its sum by units modulo n² whose product over the silos is one. The paper adds
  numbers modulo n that sum to zero. A unit hides the message *and* the randomness of a ciphertext,
  so a single silo's upload is uniform.
* One silo re-randomises each ciphertext; the silos take turns. Without this step the server, which
  made the encryptions, could predict the randomness of the product of all uploads for any guess of
  the updates.
* A silo adds a dither to its noise: a random number, uniform over one step of the encoding. The
  paper's noise is a multiple of C_LCM. The decrypted sum modulo C_LCM would therefore depend on the
  updates alone, and the greatest common divisor of sum and C_LCM would reveal factors of the N_u.
  With the dither, the decrypted sum modulo C_LCM is uniform.
* Users may be drawn so that no party knows who takes part. For each user the server makes
  ``draw_choices`` encryptions: ``winning_choices`` of them encrypt the weight, and the others
  encrypt zero. The silos open one of them by oblivious transfer. All silos open the same one,
  because they derive the choice from their seed. In the paper each silo would choose for itself,
  and a user's weights would no longer add up.

The server learns the noisy sum. It also learns the number of users without any record, because
their blinded total is zero, but not who they are. If the server draws users itself, it also knows
which places of the silos' secret order it drew. A silo learns nothing about other silos. A silo
computes only for users with records in it, so its running time reveals their approximate number.

`PaillierServer` and `PaillierSilo` are the parties; their methods are the steps of the protocol,
in order. `ServerParty` and `SiloParty` hold everything that does not depend on the scheme, so that
another scheme adds its arithmetic only. `agreement` and `paillier_settings` define the messages
between them. This package uses neither torch nor Flower.
"""
