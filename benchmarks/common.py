"""What the benchmarks share: prompts, models, provenance, results as JSON."""

import argparse
import json
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax
from dspark_jax import config
from dspark_jax.evaluation import prompts
from dspark_jax.evaluation import provenance as provenance_lib

RESULTS = pathlib.Path(__file__).parent / "results"


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--prompts", required=True, help="JSONL: id, domain, prompt")
    result.add_argument("--target", default="smollm2-135m")
    result.add_argument("--drafter", default="dspark-smollm2-135m")
    result.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    result.add_argument("--attention", default="auto", choices=config.ATTENTIONS)
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--limit", type=int, help="prompts per domain")
    result.add_argument("--output", help="JSON file; default: benchmarks/results/")
    return result


def load_prompts(path: str, limit: int | None = None) -> list[prompts.Prompt]:
    """Prompts, the domains in turn, at most `limit` of each."""
    return prompts.in_turns(prompts.load(path), limit)


def encode(tokenizer: Any, records: list[prompts.Prompt]) -> list[list[int]]:
    """Token ids of single-turn chats."""
    return prompts.encode(tokenizer, records)


def pad(ids: list[list[int]], multiple: int = 64) -> tuple[jax.Array, jax.Array]:
    """Right-padded tokens [B, P] and lengths [B]; P is a multiple of `multiple`."""
    width = -(-max(map(len, ids)) // multiple) * multiple
    tokens = np.zeros((len(ids), width), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in ids], np.int32)
    return jnp.asarray(tokens), jnp.asarray(lengths)


def load_models(
    options: argparse.Namespace, draft_vocabulary: int | None = None
) -> tuple:
    """(target, target_params, drafter, drafter_params, tokenizer)."""
    target, target_params = dspark_jax.load_target(
        options.target,
        param_dtype=options.dtype,
        compute_dtype=options.dtype,
        attention=options.attention,
    )
    tokenizer = dspark_jax.load_tokenizer(options.target)
    drafter_params: Any
    if options.drafter == "prompt-lookup":
        if draft_vocabulary is not None:
            raise SystemExit("--draft-vocabulary needs a trained drafter")
        drafter, drafter_params = dspark_jax.make_prompt_lookup()
    else:
        drafter, drafter_params = dspark_jax.load_drafter(
            options.drafter,
            target,
            target_params=target_params,
            compute_dtype=options.dtype,
            draft_vocabulary=draft_vocabulary,
        )
    return target, target_params, drafter, drafter_params, tokenizer


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    """Device, date, versions and arguments of a run."""
    arguments = {
        key: value
        for key, value in vars(options).items()
        if key not in ("prompts", "output", "peer")
    }
    for name in ("drafter", "target"):
        arguments[name] = pathlib.PurePath(arguments[name]).name
    return {**provenance_lib.of_machine(), "arguments": arguments}


def save(name: str, options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Writes the JSON and prints it as the last line of stdout."""
    report = {"benchmark": name, **provenance(options), **results}
    path = pathlib.Path(options.output) if options.output else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    print(json.dumps(report))


def log(*values: Any) -> None:
    """Progress goes to stderr."""
    print(*values, file=sys.stderr, flush=True)
