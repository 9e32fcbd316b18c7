"""DSpark speculative decoding in JAX, as pure functions.

A drafter proposes a block of tokens in one parallel pass and repairs its joint
distribution with a first-order Markov head; the target verifies the block without
changing its own distribution, in one pass as well.

Everything public is a name below, and the submodules `testing` (check your own target),
`training` (train a drafter), `evaluation` (judge it) and `serving` (many requests at
once). A name is imported at its first use, so that `import dspark_jax` costs nothing.
What `serving` is handed, cost tables above all, is made by the modules of `scheduling`.

The dimension key of all comments, docstrings and annotations:

  B requests · S context tokens · K draft positions (the paper's γ)
  W verify window = 1 + verify length · T packed tokens of a ragged batch
  V vocabulary · N support of a draft row · D model width · H query heads · G kv heads
  E head width · F feed-forward width · R Markov rank · M tapped target layers
  A anchors per sequence, or blocks · L layers · C capacity · P prompt tokens, and in
  caches the positions of a page · Q tokens of a later turn
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from dspark_jax import evaluation, serving, testing, training
    from dspark_jax.config import (
        BlockConfig,
        DecoderConfig,
        DrafterConfig,
        RopeConfig,
        Speculation,
    )
    from dspark_jax.decoding.generate import (
        autoregressive_generate,
        speculative_generate,
    )
    from dspark_jax.decoding.stepwise import (
        autoregressive_steps,
        extend,
        prefill,
        speculative_round,
        speculative_rounds,
    )
    from dspark_jax.drafters.dspark import make_drafter
    from dspark_jax.drafters.load import load_drafter
    from dspark_jax.drafters.prompt_lookup import make_prompt_lookup
    from dspark_jax.sampling import Sampling
    from dspark_jax.targets.decoder import make_target
    from dspark_jax.targets.load import load_target
    from dspark_jax.targets.tokenizer import load_tokenizer
    from dspark_jax.types import (
        FINISH_REASONS,
        Bound,
        DecodeState,
        Draft,
        Drafter,
        Generation,
        Logprobs,
        RoundInfo,
        Stats,
        Target,
    )

__version__ = "0.1.0"

__all__ = [
    "FINISH_REASONS",
    "BlockConfig",
    "Bound",
    "DecodeState",
    "DecoderConfig",
    "Draft",
    "Drafter",
    "DrafterConfig",
    "Generation",
    "Logprobs",
    "RopeConfig",
    "RoundInfo",
    "Sampling",
    "Speculation",
    "Stats",
    "Target",
    "autoregressive_generate",
    "autoregressive_steps",
    "evaluation",
    "extend",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "make_drafter",
    "make_prompt_lookup",
    "make_target",
    "prefill",
    "serving",
    "speculative_generate",
    "speculative_round",
    "speculative_rounds",
    "testing",
    "training",
]

_MODULES = ("evaluation", "serving", "testing", "training")

_HOMES = {  # the same as the imports above
    "config": (
        "BlockConfig",
        "DecoderConfig",
        "DrafterConfig",
        "RopeConfig",
        "Speculation",
    ),
    "decoding.generate": ("autoregressive_generate", "speculative_generate"),
    "decoding.stepwise": (
        "autoregressive_steps",
        "extend",
        "prefill",
        "speculative_round",
        "speculative_rounds",
    ),
    "drafters.dspark": ("make_drafter",),
    "drafters.load": ("load_drafter",),
    "drafters.prompt_lookup": ("make_prompt_lookup",),
    "sampling": ("Sampling",),
    "targets.decoder": ("make_target",),
    "targets.load": ("load_target",),
    "targets.tokenizer": ("load_tokenizer",),
    "types": (
        "FINISH_REASONS",
        "Bound",
        "DecodeState",
        "Draft",
        "Drafter",
        "Generation",
        "Logprobs",
        "RoundInfo",
        "Stats",
        "Target",
    ),
}


def __getattr__(name: str) -> typing.Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"dspark_jax.{home}"), name)
            globals()[name] = value  # the next use finds it without this function
            return value
    if name in _MODULES:
        return importlib.import_module(f"dspark_jax.{name}")
    raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
