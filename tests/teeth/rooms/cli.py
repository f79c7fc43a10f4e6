"""Mistakes in figures: metrics, `engine top`, comparisons, keys."""

from tests.teeth.mutation import Mutation

MUTATIONS = [
    Mutation(
        "compare: an unknown gap is a tie",
        "engine.compare.agreement",
        "not gap.is_bound and ",
        "",
        "tests/unit/test_compare.py::test_a_token_that_is_no_alternative_is_never_a_tie",
    ),
    Mutation(
        "compare: one side's preference is the gap",
        "engine.compare.agreement",
        "Gap(sum(lead.nats for lead in known)",
        "Gap(max(lead.nats for lead in known)",
        "tests/unit/test_compare.py"
        "::test_a_near_tie_is_told_from_a_difference_by_what_both_preferred",
    ),
    Mutation(
        "compare: every ending is the same",
        "engine.compare.agreement",
        "    same_finish = reference.finish_reason == other.finish_reason\n",
        "    same_finish = True\n",
        "tests/unit/test_compare.py"
        "::test_equal_answers_are_identical_and_their_logprobs_are_compared",
    ),
    Mutation(
        "metrics: tokens of one chunk are one",
        "engine.core.observability.metrics",
        "seconds / max(num_tokens, 1)",
        "seconds",
        "tests/unit/test_metrics.py::test_gaps_between_tokens_are_counted_under_both_names",
    ),
]
