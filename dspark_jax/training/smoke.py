"""A trial of the training command on this machine, with random weights.

`python -m dspark_jax.training.smoke configs/smollm2_dspark.toml` makes a target of the
real shapes, writes one batch of rows, times the pieces of a step one by one, then the
step, and prints one JSON object: compile seconds, milliseconds, peak memory. `--tiny`
shrinks everything for a CPU and runs the whole command, exports and restart included.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import config as config_lib
from dspark_jax.config import BlockConfig, DecoderConfig, DrafterConfig, RopeConfig
from dspark_jax.drafters.dspark import DSparkParams
from dspark_jax.targets import decoder
from dspark_jax.training import anchors, losses, objective, run, settings, target_states
from dspark_jax.training import step as step_lib
from dspark_jax.training import trainer as trainer_lib
from dspark_jax.training.settings import RunConfig
from dspark_jax.types import Target

SMOLLM2 = DecoderConfig(
    vocab_size=49152,
    num_layers=30,
    block=BlockConfig(
        width=576,
        num_heads=9,
        num_kv_heads=3,
        head_width=64,
        ffn_width=1536,
        rms_eps=1e-5,
        rope=RopeConfig(theta=1e5),
    ),
    max_position=8192,
    stop_tokens=(2, 0),
)
TINY = dataclasses.replace(
    SMOLLM2,
    vocab_size=512,
    num_layers=4,
    block=dataclasses.replace(
        SMOLLM2.block,
        width=48,
        num_heads=3,
        num_kv_heads=1,
        head_width=16,
        ffn_width=64,
    ),
    max_position=256,
)


class ByteTokenizer:
    """Bytes as ids 17…, with SmolLM2's control tokens: no files needed."""

    def encode_chat(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a ChatML chat."""
        ids = []
        for message in [{"role": "system", "content": "Hi"}, *messages]:
            text = f"{message['role']}\n{message['content']}"
            ids += [1, *_bytes(text), 2, *_bytes("\n")]
        return ids + ([1, *_bytes("assistant\n")] if add_generation_prompt else [])


def main(arguments: list[str] | None = None) -> int:
    """Runs the trial; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", type=pathlib.Path, help="with --tiny: files go here")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    config = config_lib.load_toml(options.config, RunConfig)
    if options.tiny:
        result = try_command(config, options.work, options.steps)
    else:
        result = time_pieces(config, options.steps)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def try_command(config: RunConfig, work: pathlib.Path, steps: int) -> dict[str, Any]:
    """The whole command at tiny sizes: a run, and a restart that goes on."""
    config = tiny_config(config)
    target, params = random_target(TINY, config.compute_dtype)
    tokenizer = ByteTokenizer()
    first = run.run(
        dataclasses.replace(config, steps=steps),
        target,
        params,
        tokenizer,
        work=work,
        pieces=work / "pieces",
    )
    second = run.run(config, target, params, tokenizer, work=work, resume=True)
    return {"run": first, "restart": second}


def tiny_config(config: RunConfig) -> RunConfig:
    """The same run with everything small."""
    return dataclasses.replace(
        config,
        tap_layers=(0, 1, 2),
        row_length=96,
        write_rows=16,
        max_rows=48,
        max_prefix=48,
        max_user=6,
        held_out_rows=8,
        batch_rows=4,
        log_every=5,
        train=dataclasses.replace(
            config.train, num_anchors=8, chunk_logits=64 * 512, attention="xla"
        ),
    )


def time_pieces(config: RunConfig, steps: int) -> dict[str, Any]:
    """Milliseconds of every piece at the real shapes, random weights."""
    clock = trainer_lib.Clock(time.monotonic())
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind}

    def note(**values: Any) -> None:
        result.update(values)
        clock.log(json.dumps(values))

    target, target_params = random_target(SMOLLM2, config.compute_dtype)
    drafters = settings.drafter_configs(config, target)
    begin = time.monotonic()
    rows, _ = run.write_corpus(
        config,
        target,
        target_params,
        ByteTokenizer(),
        max_batches=1,
        seconds=0,
        log=clock.log,
    )
    jax.block_until_ready(rows)
    note(first_rows_seconds=_since(begin))
    begin = time.monotonic()
    again, _ = run.write_corpus(
        config,
        target,
        target_params,
        ByteTokenizer(),
        max_batches=1,
        seconds=0,
        log=clock.log,
    )
    jax.block_until_ready(again)
    seconds = time.monotonic() - begin
    note(rows_seconds_with_cached_compile=_since(begin))
    tokens = config.write_rows * config.row_length
    note(tokens_per_second_at_least=round(tokens / seconds), memory_gb=_peak())
    index = jnp.arange(config.batch_rows, dtype=jnp.int32)
    batch = trainer_lib.take(rows, index)
    batch = target_states.Batch(
        tokens=batch.tokens, loss_mask=jnp.ones_like(batch.loss_mask)
    )
    for attention in ("cudnn", "xla"):
        states = functools.partial(
            target_states.compute,
            target,
            tap_layers=config.tap_layers,
            attention=attention,
        )
        try:
            note(**_timed(f"target_{attention}", states, target_params, batch))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            note(**{f"target_{attention}_error": str(error)[:300]})
    head = losses.head_matrix(target, target_params)
    note(**_vocabulary_pieces(config, drafters, head))
    params = run.initial_params(config, drafters, target_params)
    found = states(target_params, batch)
    embed = functools.partial(target.embed, target_params)
    note(**_body(config, params[0], drafters[0], batch, found, embed))
    state = step_lib.init_state(params, config.train)
    config = dataclasses.replace(config, held_out_rows=config.batch_rows)
    trainer = trainer_lib.Trainer(
        config, config.train, target, target_params, drafters, rows
    )
    trainer.compile(state)
    note(step_compile_seconds=round(trainer.compile_seconds, 2))
    analysis = trainer.compiled.memory_analysis()
    if analysis is not None:
        note(step_temporary_gb=round(analysis.temp_size_in_bytes / 1e9, 2))
    state, outcomes = trainer.step(state, 0, 1000)
    jax.block_until_ready(outcomes)
    begin = time.monotonic()
    for number in range(steps):
        state, outcomes = trainer.step(state, number, 1000)
    jax.block_until_ready((state, outcomes))
    note(step_ms=round(1e3 * (time.monotonic() - begin) / steps, 2), memory_gb=_peak())
    note(loss=[float(o.loss) for o in outcomes])
    begin = time.monotonic()
    trainer.held_out(state)
    note(held_out_seconds=_since(begin))
    return result


def _vocabulary_pieces(config: RunConfig, drafters: tuple, head: jax.Array) -> dict:
    """The vocabulary part alone, forward and gradients, for several chunk sizes."""
    key = jax.random.key(0)
    shape = (config.batch_rows, config.train.num_anchors, config.block_size)
    dtype, width = head.dtype, head.shape[1]

    def draw(*tail):
        return jax.random.normal(key, (*shape, *tail), jnp.float32).astype(dtype)

    drafts = tuple(
        losses.DraftRows(
            hidden=draw(width),
            feature=draw(d.markov_rank) if d.markov_rank else None,
            w2=jnp.zeros((head.shape[0], d.markov_rank)) if d.markov_rank else None,
        )
        for d in drafters
    )
    labels = jax.random.randint(key, shape, 0, head.shape[0])
    weights = jnp.full(shape, 1e-5, jnp.float32)

    # Arrays are arguments: a closed-over one is a constant, folded for 20 s a compile.
    def loss(drafts, head, hidden, labels, weights, chunk_slots):
        found, _ = losses.vocabulary_loss(
            drafts,
            head,
            hidden,
            labels,
            (weights,) * len(drafts),
            (losses.TermWeights(jnp.float32(0.1), jnp.float32(0.9)),) * len(drafts),
            chunk_logits=chunk_slots * head.shape[0],
        )
        return sum(found)

    result: dict[str, float] = {}
    for chunk_slots in (1024, 2048, 4096, 8192, 16384):
        gradient = jax.grad(
            functools.partial(loss, chunk_logits=chunk_slots * head.shape[0])
        )
        result |= _timed(
            f"vocabulary_{chunk_slots}",
            gradient,
            drafts,
            head,
            draw(width),
            labels,
            weights,
        )
    return result


def _body(
    config: RunConfig,
    params: DSparkParams,
    drafter: DrafterConfig,
    batch: target_states.Batch,
    states: target_states.TargetStates,
    embed: Callable[[jax.Array], jax.Array],
) -> dict[str, float]:
    """One drafter without the vocabulary, forward and gradients."""
    chosen = anchors.sample(
        jax.random.key(0), batch.loss_mask, config.train.num_anchors
    )
    blocks = anchors.make_blocks(
        batch.tokens,
        batch.loss_mask,
        chosen,
        block_size=drafter.block_size,
        mask_token=drafter.mask_token,
    )

    def loss(params, *rest):
        rows, _ = objective.draft_rows(
            params, drafter, *rest, recipe=settings.Recipe(), config=config.train
        )
        return jnp.sum(jnp.square(rows.hidden.astype(jnp.float32)))

    inputs = embed(blocks.inputs)
    return _timed(
        "drafter_body", jax.grad(loss), params, blocks, chosen, states, inputs
    )


def _timed(name: str, function: Callable, *arguments: Any, count: int = 10) -> dict:
    begin = time.monotonic()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_seconds = _since(begin)
    jax.block_until_ready(compiled(*arguments))
    begin = time.monotonic()
    for _ in range(count):
        found = compiled(*arguments)
    jax.block_until_ready(found)
    milliseconds = round(1e3 * (time.monotonic() - begin) / count, 2)
    return {f"{name}_ms": milliseconds, f"{name}_compile_seconds": compile_seconds}


def random_target(
    config: DecoderConfig, dtype: str
) -> tuple[Target, decoder.DecoderParams]:
    """A target with random weights."""
    config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
    return decoder.make_target(config), decoder.init(jax.random.key(0), config)


def _bytes(text: str) -> list[int]:
    return [17 + byte for byte in text.encode()]


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 2)


def _peak() -> float | None:
    statistics = jax.devices()[0].memory_stats() or {}
    peak = statistics.get("peak_bytes_in_use")
    return None if peak is None else round(peak / 1e9, 2)


if __name__ == "__main__":
    sys.exit(main())
