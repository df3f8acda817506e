"""Private weighting: the sum Σ_s (Σ_u (n_su / N_u) Δ_su + z_s), with secret counts of records.

No party learns how many records a user has in a silo other than its own. Source: Protocol 1 of Kato
et al., "Uldp-FL" (PVLDB 2024), for honest-but-curious parties that do not collude.
``docs/proved/paillier.md`` states what each party sees, and gives the reasons for six additions to
the paper: a secret order of the users, a seed that silo 0 cannot choose, masks that multiply to
one, re-randomised ciphertexts, dithered noise, and draws that no party learns.

====================  =====================================================================
paper                 here
====================  =====================================================================
n_su, N_u, N_max      ``counts``, their sum over silos, ``max_records_per_user``
C_LCM                 `PaillierSettings.common_multiple`
R, r_u                the silos' seed; `user_blinds`
Δ̃^{s,u}, z_s          ``updates``, ``noise``
P                     `PaillierSettings.precision`, for the whole sum over all silos
====================  =====================================================================

`PaillierServer` and `PaillierSilo` are the parties; their methods are the steps of the protocol,
in order. `ServerParty` and `SiloParty` hold everything that does not depend on the scheme, so a
further scheme adds only its arithmetic. `agreement` and `paillier_settings` define the messages
between the server and the silos. This package uses neither torch nor Flower.
"""
