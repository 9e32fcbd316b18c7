"""Shares of the workers: every tile exactly once, in at most so many parts."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cached_attention import schedule

pytestmark = pytest.mark.usefixtures("quick_compilation")

equal_shares = jax.jit(schedule.equal_shares, static_argnums=(1, 2, 3))


@hypothesis.given(
    tiles=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    workers=st.integers(1, 9),
    max_parts=st.integers(2, 5),
)
@hypothesis.settings(max_examples=25)
def test_equal_shares_read_every_tile_once(tiles, heads, workers, max_parts):
    plan = equal_shares(jnp.asarray(tiles, jnp.int32), heads, workers, max_parts)
    plan = jax.tree.map(np.asarray, plan)
    share = int(plan.share[0])
    assert share >= -(-sum(tiles) * heads // workers)
    read = {}  # (run, head, tile) -> part
    for worker in range(workers):
        first = int(plan.first_unit[worker])
        for unit in range(first, first + int(plan.num_units[worker])):
            run, head = divmod(unit, heads)
            start = int(plan.unit_start[run]) + head * tiles[run]
            low = max(worker * share - start, 0)
            high = min((worker + 1) * share - start, tiles[run])
            assert low < high
            for tile in range(low, high):
                assert (run, head, tile) not in read
                read[run, head, tile] = worker - start // share
    assert len(read) == sum(tiles) * heads
    assert max(read.values()) < max_parts
    for run, count in enumerate(tiles):
        for head in range(heads):
            found = {read[run, head, tile] for tile in range(count)}
            assert found == set(range(plan.num_parts[run, head]))


def test_whole_units_go_round():
    plan = schedule.whole_units(jnp.ones((3,), jnp.int32), 2, 4)
    np.testing.assert_array_equal(plan.first_unit, [0, 1, 2, 3])
    np.testing.assert_array_equal(plan.num_units, [2, 2, 1, 1])
