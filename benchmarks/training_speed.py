"""Speed of a training step at the shapes of Qwen3-4B, with random weights.

python benchmarks/training_speed.py --rows 1 2 4 --attention mosaic_gpu cudnn xla

Prints, for every name and number of rows, tokens per second (all positions of the
rows), supervised slots per second, the compiled step's memory, and the share of the
matrix product rate that a large bf16 product reaches in the same run. The FLOPs are
those of the matrix products that the step needs: what the implementation adds (masked
scores, recomputation) does not count.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import log, save

from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.evaluation.shapes import QWEN3_4B
from dspark_jax.targets import decoder
from dspark_jax.training import (
    anchor_attention,
    settings,
    step,
    target_states,
    vocabulary,
)
from dspark_jax.types import PyTree, Target

TINY = dataclasses.replace(
    QWEN3_4B,
    vocab_size=512,
    num_layers=8,
    block=dataclasses.replace(
        QWEN3_4B.block,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        head_width=16,
        ffn_width=128,
    ),
)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--block", type=int, default=7)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rank", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=settings.ATTENTIONS,
        default=["mosaic_gpu", "cudnn", "xla"],
        help="compared in this run, one after the other",
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=float("inf"),
        help="start nothing new after this many seconds",
    )
    parser.add_argument("--chunk-logits", type=int, default=2**28)
    parser.add_argument("--tiny", action="store_true", help="a trial on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output")
    options = parser.parse_args()
    begin = time.perf_counter()
    # `common.save` names these of every benchmark.
    options.target, options.drafter = "qwen3-4b-shapes-random", "dspark"
    dtype = "float32" if options.tiny else "bfloat16"
    shapes = TINY if options.tiny else QWEN3_4B
    config = dataclasses.replace(shapes, param_dtype=dtype, compute_dtype=dtype)
    peak = matmul_peak(256 if options.tiny else 8192, dtype)
    log(f"matmul peak {peak / 1e12:.1f} TFLOP/s")
    target = decoder.make_target(config)
    # Not jitted: one small program a shape instead of one a matrix.
    target_params = decoder.init(jax.random.key(options.seed), config)
    head = jax.jit(functools.partial(vocabulary.head_matrix, target))(target_params)
    tables: list[dict[str, Any]] = []
    # Names in turn: what is compared is measured side by side.
    for rows, attention in itertools.product(options.rows, options.attention):
        if time.perf_counter() - begin > options.limit_seconds:
            log("out of time")
            break
        given = options, target, target_params, head, rows, attention
        try:
            tables.append(measure(*given, peak))
        except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:
            message = " ".join(str(error).split())[:300]
            tables.append({"rows": rows, "attention": attention, "error": message})
        log(tables[-1])
    for line in comparison(tables):
        log(line)
    save("training_speed", options, {"matmul_flops_per_s": peak, "tables": tables})


def comparison(tables: list[dict[str, Any]]) -> list[str]:
    """The tables for a person, a line each."""
    lines = ["attention    rows  tokens/s  ms a step  peak GB  share of peak"]
    for table in tables:
        start = f"{table['attention']:<12} {table['rows']:>4}"
        if "error" in table:
            lines.append(f"{start}  {table['error'][:60]}")
            continue
        lines.append(
            f"{start} {table['tokens_per_second']:>9,} {table['step_ms']:>10.1f} "
            f"{table['peak_gb']:>8.2f} {table['share_of_matmul_peak']:>14.1%}"
        )
    return lines


def measure(
    options: Any,
    target: Target,
    target_params: PyTree,
    head: jax.Array,
    rows: int,
    attention: str,
    peak: float,
) -> dict[str, Any]:
    """One step, compiled, timed and weighed."""
    config: DecoderConfig = target.config
    last = config.num_layers - 1
    taps = tuple(int(x) for x in np.linspace(1, last - 1, min(5, last)).round())
    drafter = DrafterConfig(
        vocab_size=config.vocab_size,
        num_layers=options.layers,
        block=config.block,
        max_position=config.max_position,
        block_size=options.block,
        mask_token=config.vocab_size - 1,
        tap_layers=taps,
        num_target_layers=config.num_layers,
        markov_kind="vanilla",
        markov_rank=options.rank,
        confidence_kind="markov",
        compute_dtype=config.compute_dtype,
    )
    train = settings.TrainConfig(
        num_anchors=options.anchors,
        attention=attention,
        chunk_logits=options.chunk_logits,
    )
    key = jax.random.key(options.seed)
    params = step.init_params(key, drafter)
    state = step.init_state((params,), train)
    tokens = jax.random.randint(key, (rows, options.length), 0, config.vocab_size)
    batch = target_states.Batch(
        tokens=tokens, loss_mask=jnp.ones(tokens.shape, jnp.bool_)
    )

    @functools.partial(jax.jit, donate_argnames=("state",))
    def run(state, key, batch, target_params, head, rate):
        return step.train_step(
            jax.random.fold_in(key, state.step),
            state,
            batch,
            target_params,
            rate,
            target=target,
            drafters=(drafter,),
            config=train,
            head=head,
        )

    arguments = key, batch, target_params, head, jnp.float32(1e-4)
    begin = time.perf_counter()
    compiled = run.lower(state, *arguments).compile()
    compile_seconds = time.perf_counter() - begin
    state, outcome = compiled(state, *arguments)
    jax.block_until_ready(state)
    seconds = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        state, outcome = compiled(state, *arguments)
        jax.block_until_ready((state, outcome))
        seconds.append(time.perf_counter() - begin)
    middle = float(np.median(seconds))
    flops = step_flops(options, config, drafter, rows)
    analysis: Any = compiled.memory_analysis()
    peak_bytes = (  # of this program, whatever ran before
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    slots = rows * options.anchors * options.block
    statistics = jax.devices()[0].memory_stats() or {}
    return {
        "rows": rows,
        "attention": attention,
        "blocks_by": anchor_attention.choose(attention, drafter),
        "step_ms": round(1e3 * middle, 2),
        "step_ms_spread": [round(1e3 * min(seconds), 2), round(1e3 * max(seconds), 2)],
        "tokens_per_second": round(rows * options.length / middle),
        "slots_per_second": round(slots / middle),
        "tflop": {name: round(value / 1e12, 3) for name, value in flops.items()},
        "share_of_matmul_peak": round(sum(flops.values()) / middle / peak, 4),
        "temporary_gb": round(analysis.temp_size_in_bytes / 1e9, 2),
        "arguments_gb": round(analysis.argument_size_in_bytes / 1e9, 2),
        "peak_gb": round(peak_bytes / 1e9, 2),
        "peak_gb_so_far": round(statistics.get("peak_bytes_in_use", 0) / 1e9, 2),
        "whole_logits_gb": round(4 * slots * config.vocab_size / 1e9, 2),
        "compile_seconds": round(compile_seconds, 1),
        "loss": float(outcome[0].loss),
    }


def step_flops(
    options: Any, config: DecoderConfig, drafter: DrafterConfig, rows: int
) -> dict[str, float]:
    """FLOPs of the products of one step: target forward, drafter and loss both ways."""
    block, length, vocab = config.block, options.length, config.vocab_size
    tokens, slots = rows * length, rows * options.anchors * options.block
    query = block.num_heads * block.head_width
    kv = block.num_kv_heads * block.head_width
    mlp = 3 * block.width * block.ffn_width
    projections = 2 * block.width * query + 2 * block.width * kv + mlp
    causal = 4 * query * length / 2  # scores and values of a token, on average
    target = config.num_layers * tokens * (2 * projections + causal)
    features = 2 * tokens * len(drafter.tap_layers) * block.width**2
    context = drafter.num_layers * tokens * 2 * 2 * block.width * kv
    attention = 4 * query * (length / 2 + options.block)
    body = drafter.num_layers * slots * (2 * projections + attention)
    drafting = 3 * (features + context + body)  # forward, and twice as much backward
    # Target logits; draft logits with W2; gradients of hidden and feature, and of W2.
    width, rank = block.width, drafter.markov_rank
    vocabulary = 2 * slots * vocab * (width + 2 * (width + rank) + rank)
    return {"target": target, "drafter": drafting, "vocabulary": vocabulary}


def matmul_peak(size: int, dtype: str) -> float:
    """FLOP/s of a square product on random data, the best of three medians."""
    a, b = (
        jax.random.normal(jax.random.key(i), (size, size), jnp.float32).astype(dtype)
        for i in range(2)
    )
    product = jax.jit(jnp.matmul)
    product(a, b).block_until_ready()
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(10):
            out = product(a, b)
        out.block_until_ready()
        best = min(best, (time.perf_counter() - begin) / 10)
    return 2 * size**3 / best


if __name__ == "__main__":
    main()
