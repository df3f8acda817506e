"""Defaults of the mechanisms of a round."""

from flower_ext.privacy import FullParticipation, NonPrivatePlan
from tests.support.plans import mechanism
from tests.support.run_summary import run_summary, worst_case


def test_of_guarantees_against_several_adversaries_the_largest_epsilon_is_spent():
    class ThreeViews(NonPrivatePlan):
        def guarantees(self, run):
            models, sums, uploads = mechanism().guarantees(run)
            return [models, uploads, sums]

    run = run_summary(participations=worst_case(3, 10))
    plan = ThreeViews(sampling=FullParticipation(10))
    assert plan.spent(run) == {"epsilon_provable": plan.guarantees(run)[1].epsilon}
    assert plan.spent(run_summary()) == {}
