"""What evaluation and calibration load: a target, its tokenizer, drafters, prompts."""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from dspark_jax.commands import failure, models, terminal
from dspark_jax.drafters import load as drafter_lib
from dspark_jax.drafters import prompt_lookup
from dspark_jax.evaluation import prompts as prompt_lib
from dspark_jax.evaluation.prompts import Prompt
from dspark_jax.targets import fetch
from dspark_jax.targets import load as target_lib
from dspark_jax.targets import tokenizer as tokenizer_lib
from dspark_jax.types import Drafter, PyTree, Target

PROMPT_LOOKUP = "prompt-lookup"


@dataclasses.dataclass(frozen=True)
class NamedDrafter:
    """A drafter, and what tables call it."""

    name: str
    drafter: Drafter
    params: PyTree

    @property
    def has_confidence(self) -> bool:
        return getattr(self.drafter.config, "confidence_kind", "none") != "none"

    def describe(self) -> dict[str, Any]:
        """What sets drafters apart, as JSON values; what one lacks is null."""
        config = self.drafter.config
        names = ["num_layers", "block_size", "tap_layers", "markov_kind", "markov_rank"]
        names += ["confidence_kind"]
        return {"name": self.name} | {n: getattr(config, n, None) for n in names}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The models of a command, and its prompts as ids."""

    target: Target
    target_params: PyTree
    stop_tokens: tuple[int, ...]
    drafters: list[NamedDrafter]
    prompts: list[Prompt]
    ids: list[list[int]]


def load(
    arguments: argparse.Namespace, sources: Sequence[str], prompts: list[Prompt]
) -> Loaded:
    """Loads the target, every drafter of `sources`, and encodes the prompts.

    Raises:
      Failure: a source that is missing, damaged or does not fit.
    """
    models.keep_compiled_programs()
    with failure.of_target():
        path = fetch.locate(arguments.target)
        with terminal.status("loading the models"):
            tokenizer = tokenizer_lib.load_tokenizer(path)
            target, target_params = target_lib.load_target(
                path,
                param_dtype=arguments.dtype,
                compute_dtype=arguments.dtype,
                attention=arguments.attention,
            )
            drafters = [
                _load_drafter(arguments, name, source, target, target_params)
                for name, source in _names(sources)
            ]
        ids = prompt_lib.encode(tokenizer, prompts)
    for prompt, tokens in zip(prompts, ids, strict=True):
        if max(tokens, default=-1) >= target.config.vocab_size or not tokens:
            raise failure.Failure(
                f"prompt {prompt.id!r} has no tokens, or some beyond the target's "
                f"vocabulary of {target.config.vocab_size}"
            )
        if len(tokens) >= target.config.max_position:
            raise failure.Failure(
                f"prompt {prompt.id!r} has {len(tokens)} tokens, too many for the "
                f"{target.config.max_position} positions of the target"
            )
    return Loaded(
        target=target,
        target_params=target_params,
        stop_tokens=tuple(sorted({*tokenizer.stop_tokens, *target.config.stop_tokens})),
        drafters=drafters,
        prompts=prompts,
        ids=ids,
    )


def _load_drafter(
    arguments: argparse.Namespace,
    name: str,
    source: str,
    target: Target,
    target_params: PyTree,
) -> NamedDrafter:
    if source == PROMPT_LOOKUP:
        for option in ("candidates", "draft_vocabulary"):
            if getattr(arguments, option) is not None:
                raise failure.Failure(
                    f"--{option.replace('_', '-')} needs a trained drafter, not "
                    f"{source}"
                )
        return NamedDrafter(name, *prompt_lookup.make_prompt_lookup())
    with failure.of_drafter():
        drafter, params = drafter_lib.load_drafter(
            source,
            target,
            target_params=target_params,
            compute_dtype=arguments.dtype,
            draft_vocabulary=arguments.draft_vocabulary,
        )
    return NamedDrafter(name, drafter, params)


def _names(sources: Sequence[str]) -> list[tuple[str, str]]:
    """(name, source): NAME=SOURCE, or the last part of the source."""
    found: list[tuple[str, str]] = []
    for given in sources:
        name, is_named, source = given.partition("=")
        if not is_named:
            name, source = pathlib.PurePath(given).name or given, given
        if not name or not source:
            raise failure.Failure(f"--drafter must be SOURCE or NAME=SOURCE: {given!r}")
        if name in dict(found):
            raise failure.Failure(
                f"--drafter: two are called {name!r}; name them: NAME=SOURCE"
            )
        found.append((name, source))
    return found
