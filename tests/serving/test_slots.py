"""Who is let in, and what stays free for those who run."""

import pytest

from dspark_jax.serving import EngineConfig
from dspark_jax.serving.requests import DECODING, RequestHandle
from dspark_jax.serving.slots import SlotTable


def make_table(num_pages, *, page_size=4, num_slots=8):
    config = EngineConfig(
        num_slots=num_slots, page_size=page_size, num_pages=num_pages, max_length=256
    )
    return SlotTable(config)


def put(table, length, limit):
    request = RequestHandle(
        None, len(table.queue), [0] * length, limit, None, {}, [], None
    )
    table.put(request)
    return request


@pytest.mark.parametrize(
    ("limit", "num_pages", "num_admitted"),
    [
        # Three pages each, for nine tokens, and they grow no more.
        (9, 8, 2),
        (9, 9, 3),
        # A page more each: one stays free for each that runs.
        (16, 10, 2),
        (16, 11, 3),
        # 31 more each: an eighth of them is more than one each.
        (136, 13, 1),
        (136, 14, 2),
        (136, 20, 2),
        (136, 21, 3),
    ],
)
def test_pages_stay_free_for_those_who_grow(limit, num_pages, num_admitted):
    table = make_table(num_pages)
    for _ in range(3):
        put(table, 8, limit)
    assert len(table.admit()) == num_admitted


def test_one_alone_is_let_in_where_it_fits():
    table = make_table(64)
    request = put(table, 8, 256)
    assert table.admit() == [0]
    request._status = DECODING
    assert table.reserve(request, 256)
    assert table.pages.num_free == 0
