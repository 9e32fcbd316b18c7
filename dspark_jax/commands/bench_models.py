"""What `dspark bench serve` serves: loaded models, or random weights."""

import argparse
import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from dspark_jax.commands import drafters, failure, options
from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.drafters import dspark
from dspark_jax.evaluation import prompts as prompt_lib
from dspark_jax.evaluation import replay as replay_lib
from dspark_jax.evaluation import shapes
from dspark_jax.sampling import Sampling
from dspark_jax.serving.loads import Job
from dspark_jax.targets import decoder
from dspark_jax.types import Drafter, PyTree, Target

_PROMPT_TOKENS = (32, 96)  # of random prompts


class BenchModels(NamedTuple):
    """Models, prompts by domain, and what the result says about them."""

    target: Target
    target_params: PyTree
    drafter: Drafter
    drafter_params: PyTree
    prompts: list[tuple[str, list[int]]]  # (domain, ids)
    stop_tokens: tuple[int, ...]
    about: dict[str, Any]

    @property
    def longest_prompt(self) -> int:
        return max(len(ids) for _, ids in self.prompts)

    def jobs(self, arguments: argparse.Namespace, count: int) -> list[Job]:
        """The first `count` requests; prompts come again if there are fewer.

        Answers may have half of `max_new_tokens` to all of them, so that requests end
        at different times, as they do under a real load. If all had the same length,
        plain decoding would run in waves, and spare itself most of the prefill steps.
        """
        longest = arguments.max_new_tokens
        rng = np.random.default_rng([arguments.seed, count])
        limits = rng.integers(-(-longest // 2), longest, size=count, endpoint=True)
        temperature = arguments.temperature
        sampling = Sampling(temperature=temperature) if temperature else Sampling()
        chosen = [self.prompts[i % len(self.prompts)] for i in range(count)]
        return [
            Job(
                domain=domain,
                tokens=ids,
                max_new_tokens=int(limits[index]),
                seed=arguments.seed * count + index,
                stop_tokens=self.stop_tokens,
                sampling=sampling,
            )
            for index, (domain, ids) in enumerate(chosen)
        ]


def load(arguments: argparse.Namespace) -> BenchModels:
    """Loads, or makes, what the command line names."""
    if arguments.shapes is not None:
        return _random(arguments)
    with failure.of_input():
        chosen = prompt_lib.in_turns(prompt_lib.load(arguments.prompts))
    source = arguments.drafter or options.default_drafter(arguments.target, "bench")
    loaded = drafters.load(arguments, [source], chosen)
    (drafter,) = loaded.drafters
    domains = [prompt.domain for prompt in loaded.prompts]
    path = arguments.prompts
    return BenchModels(
        target=loaded.target,
        target_params=loaded.target_params,
        drafter=drafter.drafter,
        drafter_params=drafter.params,
        prompts=list(zip(domains, loaded.ids, strict=True)),
        stop_tokens=loaded.stop_tokens,
        about={
            "target": pathlib.PurePath(arguments.target).name,
            "drafter": drafter.describe(),
            "prompts": "library" if path is None else pathlib.PurePath(path).name,
            "num_prompts": len(loaded.prompts),
            "is_replayed": False,
        },
    )


def _random(arguments: argparse.Namespace) -> BenchModels:
    drafters.models.keep_compiled_programs()
    with failure.of_input():
        replay = replay_lib.read(arguments.replay, arguments.replay_domains)
        target_config, drafter_config = random_configs(arguments)
        target = decoder.make_target(target_config)
        drafter = dspark.make_drafter(drafter_config, target)
        scripted, replaying = replay_lib.make_models(target, drafter, replay)
    key, drafter_key = jax.random.split(jax.random.key(arguments.seed))
    rng = np.random.default_rng(arguments.seed)
    lengths = rng.integers(*_PROMPT_TOKENS, size=64, endpoint=True)
    prompts = [
        (
            replay.domains[i % len(replay.domains)],
            rng.integers(replay_lib.PERIOD, size=length).tolist(),
        )
        for i, length in enumerate(lengths)
    ]
    return BenchModels(
        target=scripted,
        target_params=decoder.init(key, target_config),
        drafter=replaying,
        drafter_params=dspark.init(drafter_key, drafter_config),
        prompts=prompts,
        stop_tokens=(),
        about={
            "target": f"random weights, shapes of {arguments.shapes}",
            "drafter": {
                "name": "random weights",
                "num_layers": drafter_config.num_layers,
                "block_size": drafter_config.block_size,
                "markov_rank": drafter_config.markov_rank,
            },
            "prompts": f"random, {_PROMPT_TOKENS[0]} to {_PROMPT_TOKENS[1]} tokens",
            "num_prompts": len(prompts),
            "is_replayed": True,
            "replay": {
                "what": "words are scripted by position; drafts are accepted with "
                "probability c, which is also the confidence, drawn per slot from a "
                "beta distribution",
                "calibration": pathlib.PurePath(arguments.replay).name,
                "domains_from": arguments.replay_domains
                and pathlib.PurePath(arguments.replay_domains).name,
                "domains": list(replay.domains),
                "conditional_acceptance": [
                    list(shares) for shares in replay.conditional_acceptance
                ],
                "concentration": replay.concentration,
            },
        },
    )


def random_configs(
    arguments: argparse.Namespace,
) -> tuple[DecoderConfig, DrafterConfig]:
    """Qwen3-4B with a drafter of the shapes that DeepSpec publishes, or tiny ones."""
    dtype = arguments.dtype
    if arguments.shapes == "tiny":
        target = shapes.TINY
        draft = {"num_layers": 1, "tap_layers": (0,), "markov_rank": 8, "mask_token": 1}
    else:
        target = shapes.QWEN3_4B
        draft = {
            "num_layers": 5,
            "tap_layers": (1, 9, 17, 25, 33),
            "markov_rank": 256,
            "mask_token": 151_669,
        }
    drafter = DrafterConfig(
        **{
            "vocab_size": target.vocab_size,
            "block": target.block,
            "max_position": target.max_position,
            "param_dtype": dtype,
            "compute_dtype": dtype,
            "block_size": 7,
            "num_target_layers": target.num_layers,
            **draft,
        }
    )
    target = dataclasses.replace(
        target,
        param_dtype=dtype,
        compute_dtype=dtype,
        attention=arguments.attention,
    )
    return target, drafter
