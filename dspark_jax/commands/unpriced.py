"""Engines that are made before their costs are known, because they measure them."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Inside, an engine without `costs` is made without the warning about it."""
    logger = logging.getLogger("dspark_jax.serving.planning")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
