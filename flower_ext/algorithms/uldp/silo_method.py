"""The base of methods for users whose records lie in several silos."""

from dataclasses import dataclass, replace

from flower_ext.checks import Count
from flower_ext.errors import InvalidValue
from flower_ext.federation import Method, Population, Summation
from flower_ext.federation.population import UsersInSilos
from flower_ext.privacy import FixedSizeSampling, PrivacyPlan
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.run_summary import MethodTraits


@dataclass(frozen=True, kw_only=True)
class SiloMethod(Method):
    """Base of methods whose clients are silos; the server asks all of them in every round.

    Parameters
    ----------
    num_silos : int
        Number of silos.
    **options
        Fields of `Method`.
    """

    num_silos: Count

    @property
    def traits(self) -> MethodTraits:
        """The method's traits, with its number of silos."""
        return replace(super().traits, num_silos=self.num_silos)

    def population(self, plan: PrivacyPlan, summation: Summation) -> Population:
        """Return the users, whom the plan samples, and the silos, all of which the server asks."""
        return UsersInSilos(plan.sampling, self.num_silos)


def sums_of_users(mechanism: RoundMechanism) -> NoisedSum:
    """Return ``mechanism`` itself, or refuse it if the methods of Uldp-FL cannot train with it."""
    if not isinstance(mechanism, NoisedSum):
        raise InvalidValue(f"plan={type(mechanism).__name__}: expected a ReleasePlan for users")
    if mechanism.noised_by_server:
        raise InvalidValue(
            "noise_placement='server' of the plan: expected 'client' or a SecureSum, because the "
            "silos, which are the clients, add the noise"
        )
    if isinstance(mechanism.sampling, FixedSizeSampling):
        raise InvalidValue(
            f"sampling={mechanism.sampling!r} of the plan: expected FullParticipation or "
            "PoissonSampling"
        )
    return mechanism
