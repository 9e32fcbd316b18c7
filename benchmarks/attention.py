"""Attention by a kernel against XLA: the words of a real model, logits, time of a pass.

`words`: the target decodes plainly and with its drafter, by both; where a text differs
from XLA's plain one, the place and XLA's gap of the two best logits there.
`passes`: a target of Qwen3-4B's shapes, random weights, on random caches, dense and
paged: how far the logits are from XLA's, and milliseconds of a pass, in turns.

python benchmarks/attention.py --prompts FILE --dtype bfloat16 --limit 4
"""

import argparse
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import encode, load_models, load_prompts, log, pad, parser, save
from lossless import first_difference

import dspark_jax
from dspark_jax import paged_cache
from dspark_jax.evaluation import shapes
from dspark_jax.targets import decoder
from dspark_jax.types import PyTree, Target

PAGE = 64


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--kernel", default="mosaic_gpu", help="against XLA")
    arguments.add_argument("--parts", nargs="+", default=["words", "passes"])
    arguments.add_argument("--max-new-tokens", type=int, default=64)
    arguments.add_argument("--layers", type=int, default=36, help="of the passes")
    arguments.add_argument(
        "--cells",
        nargs="+",
        default=["1x8x2048", "8x8x2048", "64x1x2048", "64x8x2048", "4x64x2048"],
        help="requests x rows x context",
    )
    arguments.add_argument("--repeats", type=int, default=7)
    options = arguments.parse_args()
    results: dict[str, Any] = {}
    if "words" in options.parts:
        results["words"] = _words(options)
    if "passes" in options.parts:
        results["passes"] = _passes(options)
    save("attention", options, results)


def _words(options: argparse.Namespace) -> dict[str, Any]:
    texts: dict[str, list[np.ndarray]] = {}
    for name in ("xla", options.kernel):
        options.attention = name
        target, params, drafter, drafter_params, tokenizer = load_models(options)
        records = load_prompts(options.prompts, options.limit)
        prompts = encode(tokenizer, records)
        tokens, lengths = pad(prompts)
        shared = {
            "target": target,
            "max_new_tokens": options.max_new_tokens,
            "stop_tokens": tokenizer.stop_tokens,
        }
        plain: Any = functools.partial(dspark_jax.autoregressive_generate, **shared)
        speculative: Any = functools.partial(
            dspark_jax.speculative_generate, **shared, drafter=drafter
        )
        drafting = {"drafter_params": drafter_params}
        for loop, generate, more in (
            ("plain", plain, {}),
            ("speculative", speculative, drafting),
        ):
            made = jax.device_get(
                jax.jit(generate)(
                    jax.random.key(0), tokens, lengths, target_params=params, **more
                )
            )
            texts[f"{name} {loop}"] = [
                row[:length]
                for row, length in zip(made.tokens, made.lengths, strict=True)
            ]
            if name == "xla" and loop == "plain":
                best = jax.lax.top_k(_logits(target, params, made.tokens), 2)[0]
                gaps = np.asarray(best[..., 0] - best[..., 1])
    want = texts["xla plain"]
    found = {}
    for name, text in texts.items():
        differing: list[dict[str, Any]] = []
        for row, (mine, theirs) in enumerate(zip(text, want, strict=True)):
            at = first_difference(mine, theirs)
            if at is not None:
                gap = float(gaps[row, at - 1])
                differing.append(
                    {
                        "id": records[row].id,
                        "position": at - int(lengths[row]),
                        "top2_gap": gap,
                    }
                )
        found[name] = {
            "num_texts": len(want),
            "num_equal": len(want) - len(differing),
            "largest_gap": max((d["top2_gap"] for d in differing), default=0.0),
            "differing": differing,
        }
        log(name, {k: v for k, v in found[name].items() if k != "differing"})
    return found


@functools.partial(jax.jit, static_argnums=0)
def _logits(target: Target, params: PyTree, tokens: jax.Array) -> jax.Array:
    index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.broadcast_to(index, tokens.shape)
    cache = target.init_cache(*tokens.shape)
    hidden, _, _ = target.forward(params, jnp.asarray(tokens), positions, cache)
    return target.unembed(params, hidden)


def _passes(options: argparse.Namespace) -> list[dict[str, Any]]:
    config = dataclasses.replace(
        shapes.QWEN3_4B,
        num_layers=options.layers,
        param_dtype=options.dtype,
        compute_dtype=options.dtype,
    )
    params = jax.jit(decoder.init, static_argnums=1)(jax.random.key(0), config)
    found = []
    for cell in options.cells:
        requests, rows, context = (int(x) for x in cell.split("x"))
        for is_paged in (False, True):
            passes = {}
            for name in ("xla", options.kernel):
                target = decoder.make_target(
                    dataclasses.replace(config, attention=name)
                )
                passes[name] = _Pass(target, params, requests, rows, context, is_paged)
            row = {
                "requests": requests,
                "rows": rows,
                "context": context,
                "cache": f"pages of {PAGE}" if is_paged else "dense",
            } | _compared(passes, options.kernel, options.repeats)
            log(row)
            found.append(row)
            del passes
    return found


class _Pass:
    """A compiled pass that writes its rows into a cache of its own, and attends."""

    def __init__(
        self,
        target: Target,
        params: PyTree,
        requests: int,
        rows: int,
        context: int,
        is_paged: bool,
    ):
        self._params = params
        first = context - rows - jnp.arange(requests, dtype=jnp.int32) % 8
        at = first[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
        tokens = at * 7 % target.config.vocab_size
        num_pages = context // PAGE

        @jax.jit
        def make_cache(key: jax.Array) -> PyTree:
            cache = target.init_cache(requests, context)
            if is_paged:
                like = cache
                cache = paged_cache.PagePool.create(like, requests * num_pages, PAGE)
            leaves, treedef = jax.tree.flatten(cache)
            keys = jax.random.split(key, len(leaves))
            drawn = [
                jax.random.normal(k, leaf.shape, leaf.dtype)
                for k, leaf in zip(keys, leaves, strict=True)
            ]
            return jax.tree.unflatten(treedef, drawn)

        @functools.partial(jax.jit, donate_argnums=1)
        def forward(params: PyTree, cache: PyTree) -> tuple[jax.Array, PyTree]:
            if is_paged:
                table = jnp.arange(requests * num_pages, dtype=jnp.int32)
                cache = cache.view(table.reshape(num_pages, requests).T)
            hidden, _, cache = target.forward(params, tokens, at, cache)
            logits = target.unembed(params, hidden[:, -1])
            return logits, cache.pool if is_paged else cache

        self._cache = make_cache(jax.random.key(1))
        started_at = time.perf_counter()
        self._forward = forward.lower(params, self._cache).compile()
        self.compile_seconds = time.perf_counter() - started_at
        self.logits, self._cache = self._forward(params, self._cache)

    def milliseconds(self, calls: int = 10) -> float:
        """Of one pass, from `calls` of them in a row."""
        jax.block_until_ready(self._cache)
        started_at = time.perf_counter()
        for _ in range(calls):
            logits, self._cache = self._forward(self._params, self._cache)
        logits.block_until_ready()
        return (time.perf_counter() - started_at) / calls * 1e3


def _compared(passes: dict[str, _Pass], kernel: str, repeats: int) -> dict[str, Any]:
    want, got = (np.asarray(passes[x].logits, np.float64) for x in ("xla", kernel))
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(repeats):
        for name, one in passes.items():
            times[name].append(one.milliseconds())
    best = np.sort(want, axis=-1)
    return {
        "relative_difference": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        "largest_difference": float(np.abs(got - want).max()),
        "num_equal_words": int(np.sum(got.argmax(-1) == want.argmax(-1))),
        "smallest_gap": float((best[:, -1] - best[:, -2]).min()),
        "ms": {name: float(np.median(values)) for name, values in times.items()},
        "spread_ms": {name: float(np.ptp(values)) for name, values in times.items()},
        "compile_seconds": {n: p.compile_seconds for n, p in passes.items()},
    }


if __name__ == "__main__":
    main()
