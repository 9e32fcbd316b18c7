"""The models of a command, text in and out, and the cache of compiled programs."""

import argparse
import dataclasses
import os
from typing import Any

import jax
import numpy as np

from dspark_jax.commands import failure, reading, terminal
from dspark_jax.commands.session import Inputs, Session, SessionConfig
from dspark_jax.config import Speculation
from dspark_jax.drafters import load as drafter_lib
from dspark_jax.drafters import prompt_lookup
from dspark_jax.sampling import Sampling
from dspark_jax.targets import chatml, fetch
from dspark_jax.targets import load as target_lib
from dspark_jax.targets import tokenizer as tokenizer_lib

# Steps of plain decoding between two looks of the host.
PLAIN_STEPS = 16
# Tokens that the shipped drafter drafts among on a CPU.
CPU_DRAFT_VOCABULARY = 8192


@dataclasses.dataclass
class Models:
    """Target, drafter and tokenizer with the settings of the command line."""

    config: SessionConfig
    inputs: Inputs
    tokenizer: tokenizer_lib.Tokenizer
    drafter_name: str
    seed: int
    is_raw: bool

    @property
    def device(self) -> str:
        return jax.devices()[0].device_kind

    @property
    def draft_length(self) -> int | None:
        drafter = self.config.drafter
        if drafter is None:
            return None
        return self.config.options.draft_length or drafter.config.block_size

    def session(self, *, is_plain: bool = False) -> Session:
        """A new session; `is_plain` drops the drafter."""
        config, inputs = self.config, self.inputs
        if is_plain:
            config = config._replace(drafter=None, options=Speculation())
            inputs = inputs._replace(drafter_params=None, confidence_threshold=None)
        if config.drafter is None:
            rounds = PLAIN_STEPS if is_plain else 1
        else:
            # A look of the host costs a GPU more than three rounds in vain at the end.
            rounds = 4 if jax.default_backend() == "gpu" else 1
        return Session(config, inputs, self.seed, rounds)

    def encode(self, prompt: str) -> list[int]:
        """The prompt's ids, as a user's turn where there is a chat template."""
        if self.is_raw or self.tokenizer.chat is None:
            ids = self.tokenizer.encode(prompt)
        else:
            ids = self.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return self._checked(ids)

    def encode_turn(self, prompt: str, history: list[int]) -> list[int]:
        """The ids that continue `history` with a user's turn."""
        message = {"role": "user", "content": prompt}
        with failure.of_input():
            if not history:
                return self._checked(self.tokenizer.encode_chat([message]))
            # Turns are encoded one by one, so the new one is what it adds to another.
            other = [{"role": "system", "content": ""}]
            before = self.tokenizer.encode_chat(other, add_generation_prompt=False)
            both = self.tokenizer.encode_chat([*other, message])
        end = self.tokenizer.encode(chatml.TURN_END)[-1]
        newline = before[len(before) - before[::-1].index(end) :]
        closing = [] if history[-1] == end else [end]
        return [*closing, *newline, *both[len(before) :]]

    def stream(self) -> tokenizer_lib.StreamDecoder:
        return tokenizer_lib.StreamDecoder(self.tokenizer)

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise failure.Failure("the prompt has no tokens")
        if max(ids) >= self.config.target.config.vocab_size:
            raise failure.Failure(
                f"the tokenizer gives id {max(ids)}, but the target's vocabulary has "
                f"{self.config.target.config.vocab_size} tokens"
            )
        return ids


def _draft_vocabulary(arguments: argparse.Namespace, drafter: str) -> int | None:
    """How many tokens to draft among: the option, or what pays on this device.

    On a CPU the shipped drafter's head costs as much as its layers; the 8,192 most
    frequent tokens are exact as well, and faster (benchmarks/results/speed_cpu.json).
    """
    asked = arguments.draft_vocabulary
    if asked is not None or drafter not in drafter_lib.SHIPPED:
        return asked
    return CPU_DRAFT_VOCABULARY if jax.default_backend() == "cpu" else None


def load(arguments: argparse.Namespace, begun: reading.Reading | None = None) -> Models:
    """Loads what `dspark generate` was asked for.

    Args:
      begun: the target's files, if they are already being read.

    Raises:
      Failure: a source that is missing, damaged or does not fit.
    """
    keep_compiled_programs()
    name = arguments.drafter or _default_drafter(arguments.target)
    begun = begun or reading.begin(arguments.target)
    with failure.of_target():
        with terminal.status("loading the target"):
            target, target_params = target_lib.from_host(begun.target.result())
            text = begun.tokenizer.result()
        drafter: Any = None
        drafter_params: Any = None
        if name == "prompt-lookup":
            length = (
                arguments.draft_length or prompt_lookup.PromptLookupConfig.block_size
            )
            drafter, drafter_params = prompt_lookup.make_prompt_lookup(length)
        elif name != "none":
            with failure.of_drafter():
                drafter, drafter_params = drafter_lib.load_drafter(
                    name,
                    target,
                    target_params=target_params,
                    draft_vocabulary=_draft_vocabulary(arguments, name),
                )
        options = Speculation(
            rule=arguments.rule,
            draft_length=arguments.draft_length,
            candidates=arguments.candidates,
        )
    stop_tokens = sorted({*text.stop_tokens, *target.config.stop_tokens})
    inputs = Inputs(
        target_params=target_params,
        drafter_params=drafter_params,
        sampling=_sampling(arguments),
        stop_tokens=np.asarray(stop_tokens or [-1], np.int32),
        confidence_threshold=_number(arguments.confidence_threshold, np.float32),
    )
    return Models(
        config=SessionConfig(target, drafter, options),
        inputs=inputs,
        tokenizer=text,
        drafter_name=name,
        seed=arguments.seed,
        is_raw=arguments.raw,
    )


def _default_drafter(target: str) -> str:
    return drafter_lib.SHIPPED[0] if target == fetch.DEFAULT_TARGET else "prompt-lookup"


def _sampling(arguments: argparse.Namespace) -> Sampling:
    if arguments.temperature == 0:
        return Sampling()
    # Without a weak type, so that the same program serves every value.
    return Sampling(
        temperature=_number(arguments.temperature, np.float32),
        top_k=_number(arguments.top_k, np.int32),
        top_p=_number(arguments.top_p, np.float32),
        min_p=_number(arguments.min_p, np.float32),
    )


def _number(value: Any, dtype: Any) -> Any:
    return None if value is None else np.asarray(value, dtype)


def keep_compiled_programs() -> None:
    """Turns JAX's persistent cache on, in the user's cache folder."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder = fetch.cache_dir() / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
