"""What the benchmarks share: prompts, models, provenance, results as JSON."""

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax

DOMAINS = ("gsm8k", "mt_bench", "humaneval", "self_instruct")
RESULTS = pathlib.Path(__file__).parent / "results"


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--prompts", required=True, help="JSONL: id, domain, prompt")
    result.add_argument("--target", default="smollm2-135m")
    result.add_argument("--drafter", default="dspark-smollm2-135m")
    result.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--limit", type=int, help="prompts per domain")
    result.add_argument("--output", help="JSON file; default: benchmarks/results/")
    return result


def load_prompts(path: str, limit: int | None = None) -> list[dict[str, str]]:
    """Prompts, the domains in turn, at most `limit` of each."""
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    unknown = {record["domain"] for record in records} - set(DOMAINS)
    if unknown:
        raise SystemExit(f"{path}: domains other than {DOMAINS}: {sorted(unknown)}")
    by_domain = [
        [record for record in records if record["domain"] == domain][:limit]
        for domain in DOMAINS
    ]
    turns = itertools.zip_longest(*by_domain)
    return [record for turn in turns for record in turn if record is not None]


def encode(tokenizer: Any, records: list[dict[str, str]]) -> list[list[int]]:
    """Token ids of single-turn chats."""
    return [
        tokenizer.encode_chat([{"role": "user", "content": record["prompt"]}])
        for record in records
    ]


def pad(prompts: list[list[int]], multiple: int = 64) -> tuple[jax.Array, jax.Array]:
    """Right-padded tokens [B, P] and lengths [B]; P is a multiple of `multiple`."""
    width = -(-max(map(len, prompts)) // multiple) * multiple
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    return jnp.asarray(tokens), jnp.asarray(lengths)


def load_models(
    options: argparse.Namespace, draft_vocabulary: int | None = None
) -> tuple:
    """(target, target_params, drafter, drafter_params, tokenizer)."""
    target, target_params = dspark_jax.load_target(
        options.target, param_dtype=options.dtype, compute_dtype=options.dtype
    )
    tokenizer = dspark_jax.load_tokenizer(options.target)
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
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy", "dspark-jax")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed (run from the checkout)"
    arguments = {
        key: value
        for key, value in vars(options).items()
        if key not in ("prompts", "output", "peer")
    }
    for name in ("drafter", "target"):
        arguments[name] = pathlib.PurePath(arguments[name]).name
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind if device.platform != "cpu" else _cpu_name(),
        "platform": device.platform,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
        "arguments": arguments,
    }


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


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
