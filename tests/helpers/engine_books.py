"""What must be true of an engine's slots, pages and queue between any two steps."""

import numpy as np


def check(engine, handles):
    """No page is lost or held twice; slots and pages belong to those that run."""
    table = engine._loop.slots
    held = [page for request in table.running for page in request._pages]
    assert len(held) == len(set(held))
    assert len(held) + table.pages.num_free == engine.config.total_pages
    assert set(held).isdisjoint(table.pages._free)
    slots = [request._slot for request in table.running]
    assert len(slots) == len(set(slots)) <= engine.config.num_slots
    ids = [request.request_id for request in table.running]
    assert ids == sorted(ids)
    for request, row in zip(table.running, table.tables(slots), strict=True):
        assert row[row >= 0].tolist() == request._pages
    growths = [table._growth_of(request) for request in table.running]
    assert table._growth == sum(growths)
    assert table._num_growing == np.count_nonzero(growths)
    alive = [handle for handle in handles if not handle.is_done]
    assert len(alive) == len(table.running) + len(table.queue)
