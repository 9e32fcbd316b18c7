"""Checks of your own models: the laws of a `Target`, and tiny models to test with."""

from dspark_jax.testing.probe import TargetLawError
from dspark_jax.testing.target_laws import check_target
from dspark_jax.testing.tiny_models import TinyModels, make_tiny_models

__all__ = ["TargetLawError", "TinyModels", "check_target", "make_tiny_models"]
