"""A row per bad drafter or option that speculative decoding refuses, with the message.

bad_arguments.py says what a row is.
"""

import dataclasses
import types

import numpy as np
from bad_arguments import BLOCK_SIZE

import dspark_jax


def keep_a_float(k, confidence, survival):
    return survival


def without_confidence(drafter):
    config = dataclasses.replace(drafter.config, confidence_kind="none")
    return drafter._replace(config=config)


def of(**changes):
    """A change to the good arguments: the drafter with other configuration fields."""

    def change(good):
        config = dataclasses.replace(good["drafter"].config, **changes)
        return {"drafter": good["drafter"]._replace(config=config)}

    return change


SPECULATIVE = {
    "drafter missing": (
        {"drafter": None},
        TypeError,
        "`drafter` must be a Drafter, got NoneType",
    ),
    "drafter": (
        {"drafter": "dspark"},
        TypeError,
        "`drafter` must be a Drafter, got str",
    ),
    "drafter of another target": (
        of(target_fingerprint="yours"),
        ValueError,
        "`drafter` was made for another target: its fingerprint is yours, the target's "
        "is mine",
    ),
    "drafter of another vocabulary": (
        of(vocab_size=20),
        ValueError,
        "`drafter` was made for another target: its vocab_size is 20, the target's",
    ),
    "drafter of a deeper target": (
        of(num_target_layers=9),
        ValueError,
        "`drafter` was made for another target: its num_target_layers is 9, the "
        "target's is 2",
    ),
    "drafter taps too deep": (
        lambda good: {
            "drafter": good["drafter"]._replace(
                config=types.SimpleNamespace(
                    block_size=3, tap_layers=(0, 2), target_fingerprint=""
                )
            )
        },
        ValueError,
        "`drafter` taps layer 2, but the target's layers are -1..1",
    ),
    "options": (
        {"options": "token"},
        TypeError,
        "`options` must be a Speculation, got str",
    ),
    "draft length above the block size": (
        {"options": dspark_jax.Speculation(draft_length=BLOCK_SIZE + 1)},
        ValueError,
        "`options.draft_length` must be at most the drafter's block size 3, got 4",
    ),
    "keep without confidences": (
        lambda good: {
            "drafter": without_confidence(good["drafter"]),
            "options": dspark_jax.Speculation(keep=keep_a_float),
        },
        ValueError,
        "`options.keep` needs a drafter with a confidence head, but its "
        "confidence_kind is 'none'",
    ),
    "threshold without confidences": (
        lambda good: {
            "drafter": without_confidence(good["drafter"]),
            "confidence_threshold": 0.5,
        },
        ValueError,
        "`confidence_threshold` needs a drafter with a confidence head, but its "
        "confidence_kind is 'none'",
    ),
    "threshold of prompt lookup": (
        lambda good: {
            "drafter": dspark_jax.make_prompt_lookup(BLOCK_SIZE)[0],
            "confidence_threshold": 0.5,
        },
        ValueError,
        "`confidence_threshold` needs a drafter with a confidence head",
    ),
    "threshold": (
        {"confidence_threshold": 1.5},
        ValueError,
        "`confidence_threshold` must lie in [0, 1], got 1.5",
    ),
    "threshold nan": (
        {"confidence_threshold": float("nan")},
        ValueError,
        "`confidence_threshold` must lie in [0, 1], got nan",
    ),
    "threshold shape": (
        {"confidence_threshold": np.full((3,), 0.5, np.float32)},
        ValueError,
        "`confidence_threshold` must have shape () or (B,) = (2,), got (3,)",
    ),
    "confidence temperatures": (
        {"confidence_temperatures": [1.0, 0.0, 1.0]},
        ValueError,
        "`confidence_temperatures` must be positive and finite, got [1.0, 0.0, 1.0]",
    ),
    "confidence temperatures too few": (
        {"confidence_temperatures": [1.0]},
        ValueError,
        "`confidence_temperatures` must have one value a slot, at least (3,), got (1,)",
    ),
}
