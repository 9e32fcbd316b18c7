"""Chooses an implementation by its explicit predicate; nothing falls back silently."""

from collections.abc import Callable, Mapping

import jax

Refusal = Callable[[], str | None]


def choose(
    name: str | None,
    refusals: Mapping[str, Refusal],
    preferred: Mapping[str, tuple[str, ...]],
) -> str:
    """The implementation to run.

    Args:
      name: what the caller asked for; None = the first of the platform's preferred
        ones that refuses nothing.
      refusals: for every implementation a function that says why it can't run these
        arguments, or None if it can.
      preferred: implementations by platform ("cpu", "gpu", "tpu"), best first.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: the named implementation can't run these arguments; the
        message says why.
    """
    if name is not None:
        if name not in refusals:
            known = ", ".join(repr(known) for known in refusals)
            raise ValueError(f"`implementation` must be one of {known}, got {name!r}")
        reason = refusals[name]()
        if reason is not None:
            raise NotImplementedError(
                f"implementation {name!r} can't run this: {reason}"
            )
        return name
    for candidate in preferred.get(platform(), ()):
        if refusals[candidate]() is None:
            return candidate
    return "xla"


def platform() -> str:
    """The default backend's name, one of "cpu", "gpu" and "tpu"."""
    return jax.default_backend()


def compute_capability() -> tuple[int, int]:
    """Of the first GPU; (0, 0) where there is none."""
    if platform() != "gpu":
        return (0, 0)
    found = getattr(jax.devices()[0], "compute_capability", "0.0")
    major, _, minor = str(found).partition(".")
    return int(major), int(minor or 0)


def needs_hopper() -> str | None:
    """Why kernels for Hopper aren't chosen for the first GPU, or None."""
    major, minor = compute_capability()
    if major != 9:
        return f"needs compute capability 9.0, got {major}.{minor}"
    return None


def first_of(*refusals: Refusal) -> Refusal:
    """The first reason that any of them gives."""
    return lambda: next((why for why in (r() for r in refusals) if why), None)


def multiprocessors(default: int) -> int:
    """Of the first GPU; `default` where there is none."""
    if platform() != "gpu":
        return default
    return int(getattr(jax.devices()[0], "core_count", default))
