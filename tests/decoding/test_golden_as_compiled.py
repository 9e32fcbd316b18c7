"""A recorded trace by programs that are compiled as users' are, not quickly."""

import golden_traces


def test_traces_round_by_round(golden):
    golden_traces.check_traces(golden, "dspark_vanilla_b7")
