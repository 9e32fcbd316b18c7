"""Serving many requests at once: a paged cache, continuous batching, metered verify.

`Engine` is the host loop; `EngineConfig` declares its shapes. Everything public of this
package is a name below, and the module `profile`, which measures an engine's costs.
"""

from dspark_jax.serving.batching import Bucket
from dspark_jax.serving.engine import Engine, EngineError, warm_up
from dspark_jax.serving.engine_config import MODES, EngineConfig
from dspark_jax.serving.requests import QueueFullError, RequestHandle

__all__ = [
    "MODES",
    "Bucket",
    "Engine",
    "EngineConfig",
    "EngineError",
    "QueueFullError",
    "RequestHandle",
    "warm_up",
]
