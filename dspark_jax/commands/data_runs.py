"""What the subcommands of `dspark data` do; `commands.data` has their options."""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dspark_jax.commands import failure, models, terminal
from dspark_jax.drafters import load as drafter_lib
from dspark_jax.targets import load as target_lib
from dspark_jax.targets import tokenizer as tokenizer_lib
from dspark_jax.training.texts import (
    answers,
    conversations,
    corpus_files,
    corpus_writer,
    joining,
    records,
    regeneration,
    synthesis,
)
from dspark_jax.training.texts.records import Record

DEFAULT_TOKENS = 1_000_000
# Rows that the target writes at a time.
BATCH_ROWS = {"cpu": 32, "gpu": 1024, "tpu": 512}


def synthesize(arguments: argparse.Namespace) -> int:
    """The target writes prompts and answers; returns the exit status."""
    draw, digest = None, ""
    if arguments.prompts is not None:
        with failure.of_input():
            prompts = [
                next((m["content"] for m in r.messages if m["role"] == "user"), None)
                for r in records.read(arguments.prompts)
            ]
        texts = [text for text in prompts if text]
        if not texts:
            raise failure.Failure(f"{arguments.prompts} has no user turns")
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]

        def draw(rng: Any, count: int) -> list[tuple[str, str]]:
            return [("own", texts[i]) for i in rng.integers(len(texts), size=count)]

    loaded = _load(arguments)
    settings: dict[str, Any] = {}
    if arguments.temperatures:
        count = len(arguments.temperatures)
        settings["temperatures"] = tuple(arguments.temperatures)
        settings["shares"] = (1 / count,) * count
    tokens = arguments.tokens
    if tokens is None:
        tokens = DEFAULT_TOKENS if arguments.seconds is None else float("inf")
    with failure.of_input():
        config = synthesis.SynthesisConfig(
            seed=arguments.seed,
            length=arguments.length,
            batch_rows=_batch_rows(arguments),
            max_prefix=arguments.max_prompt,
            max_repeated=arguments.max_repeated,
            same_prompt=arguments.same_prompt,
            min_loss_tokens=arguments.min_loss_tokens,
            prompts=digest,
            **settings,
        )

    def work(log: Callable, should_stop: Callable) -> Any:
        return synthesis.synthesize(
            arguments.out,
            *loaded,
            config,
            seconds=arguments.seconds or float("inf"),
            num_tokens=tokens,
            resume=arguments.resume,
            draw=draw,
            log=log,
            should_stop=should_stop,
        )

    return _write(arguments, work)


def regenerate(arguments: argparse.Namespace) -> int:
    """The target answers given prompts; returns the exit status."""
    target, target_params, tokenizer = _load(arguments)
    drafter: Any = (None, None)
    with failure.of_drafter():
        if arguments.drafter:
            drafter = drafter_lib.load_drafter(
                arguments.drafter, target, target_params=target_params
            )
    with failure.of_input():
        config = answers.AnswerConfig(
            seed=arguments.seed,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            max_new_tokens=arguments.max_new_tokens,
            batch_rows=_batch_rows(arguments),
            enable_thinking=arguments.thinking,
        )

    def work(log: Callable, should_stop: Callable) -> Any:
        return regeneration.regenerate(
            arguments.out,
            _good_records(arguments.prompts, arguments.skip_bad),
            answers.Models(target, target_params, *drafter),
            tokenizer,
            config,
            max_length=arguments.max_length,
            lengths=arguments.lengths,
            min_loss_tokens=arguments.min_loss_tokens,
            resume=arguments.resume,
            log=log,
            should_stop=should_stop,
        )

    return _write(arguments, work)


def tokenize(arguments: argparse.Namespace) -> int:
    """Conversations become a corpus folder; returns the exit status."""
    with failure.of_target():
        tokenizer = tokenizer_lib.load_tokenizer(arguments.target)
        target = target_lib.load_config(arguments.target)
    lengths = arguments.lengths or conversations.default_lengths(arguments.max_length)

    def work(log: Callable, should_stop: Callable) -> Any:
        del should_stop  # nothing is committed before the end
        with corpus_writer.CorpusWriter(
            arguments.out,
            vocab_size=target.vocab_size,
            fingerprint=target.fingerprint,
        ) as writer:
            return conversations.write_corpus(
                records.read(arguments.conversations, is_lenient=arguments.skip_bad),
                tokenizer,
                writer,
                max_length=arguments.max_length,
                lengths=lengths,
                template=arguments.template,
                min_loss_tokens=arguments.min_loss_tokens,
                log=log,
            )

    return _write(arguments, work)


def join(arguments: argparse.Namespace) -> int:
    """Several corpora become one; returns the exit status."""

    def work(log: Callable, should_stop: Callable) -> Any:
        del should_stop  # nothing is committed before the end
        return joining.join(arguments.out, arguments.sources, log=log)

    return _write(arguments, work)


def show(arguments: argparse.Namespace) -> int:
    """Prints counts and a few rows of a corpus; returns the exit status."""
    with failure.of_target():
        corpus = corpus_files.load_corpus(arguments.corpus)
        tokenizer = tokenizer_lib.load_tokenizer(arguments.target)
        if tokenizer.vocab_size > corpus.vocab_size:
            raise failure.Failure(
                f"{arguments.corpus} was made for a vocabulary of {corpus.vocab_size} "
                f"tokens, the tokenizer of {arguments.target} has "
                f"{tokenizer.vocab_size}: give its --target"
            )
    ends = np.cumsum([bucket.num_rows for bucket in corpus.buckets])
    count = min(arguments.rows, corpus.num_rows)
    rng = np.random.default_rng(arguments.seed)
    chosen = np.sort(rng.permutation(corpus.num_rows)[:count])
    rows = []
    for row in chosen.tolist():
        which = int(np.searchsorted(ends, row, side="right"))
        bucket = corpus.buckets[which]
        number = row - int(ends[which]) + bucket.num_rows
        taken = bucket.take(number)
        text = _marked(tokenizer, np.asarray(taken.tokens), np.asarray(taken.loss_mask))
        rows.append({"length": bucket.length, "row": number, "text": text})
    result = {
        "num_rows": corpus.num_rows,
        "num_tokens": corpus.num_tokens,
        "vocab_size": corpus.vocab_size,
        "target_fingerprint": corpus.target_fingerprint,
        "seed": corpus.seed,
        "buckets": [
            {"length": b.length, "num_rows": b.num_rows} for b in corpus.buckets
        ],
        "counts": corpus.counts,
    }
    if arguments.json:
        print(json.dumps(result | {"rows": rows}))  # noqa: T201
        return 0
    print(json.dumps(result, indent=2))  # noqa: T201
    for row in rows:
        print(f"\n--- row {row['row']} of length {row['length']}\n{row['text']}")  # noqa: T201
    return 0


def _marked(tokenizer: Any, ids: Any, mask: Any) -> str:
    """The text of a row without its padding, supervised text in brackets."""
    known = np.flatnonzero((ids != 0) | mask)
    text, begin, end = "", 0, int(known[-1]) + 1 if known.size else 0
    while begin < end:
        stop = begin + 1
        while stop < end and mask[stop] == mask[begin]:
            stop += 1
        piece = tokenizer.decode(ids[begin:stop].tolist(), skip_special_tokens=False)
        text += f"⟦{piece}⟧" if mask[begin] else piece
        begin = stop
    return text


def _write(arguments: argparse.Namespace, work: Callable) -> int:
    """Runs `work(log, should_stop)`, and reports its counts."""

    started = time.monotonic()
    progress = terminal.Progress()

    def log(counts: Any) -> None:
        seconds = time.monotonic() - started
        message = f"{counts.num_rows} rows, {counts.num_supervised} answer tokens"
        if not getattr(arguments, "resume", False):  # all of them are this run's
            message += f", {counts.num_supervised / seconds:.0f} a second"
        progress.show(f"{message}, {seconds:.0f} s")

    # Ctrl-C ends a batch's work where batches are committed, and all of it elsewhere.
    batches: Any = terminal.interruptible()
    if not hasattr(arguments, "batch_rows"):
        batches = contextlib.nullcontext(lambda: False)
    with batches as is_interrupted, failure.of_input():
        try:
            counts = work(log, is_interrupted)
        except FileExistsError as error:
            hint = " or --resume" if hasattr(arguments, "resume") else ""
            raise failure.Failure(f"{error}{hint}") from error
        finally:
            progress.close()
        stopped = is_interrupted()
    sys.stderr.write(counts.report() + "\n")
    result = {"out": str(arguments.out), **dataclasses.asdict(counts)}
    result["seconds"] = round(time.monotonic() - started, 3)
    result["is_interrupted"] = stopped
    if arguments.json:
        print(json.dumps(result))  # noqa: T201
    return 130 if stopped else 0


def _load(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Target, its parameters and its tokenizer."""

    models.keep_compiled_programs()
    is_cpu = jax.default_backend() == "cpu"
    with failure.of_target(), terminal.status("loading the target"):
        target, params = target_lib.load_target(
            arguments.target, param_dtype="float32" if is_cpu else "bfloat16"
        )
        return target, params, tokenizer_lib.load_tokenizer(arguments.target)


def _batch_rows(arguments: argparse.Namespace) -> int:

    return arguments.batch_rows or BATCH_ROWS.get(jax.default_backend(), 256)


def _good_records(path: pathlib.Path, is_lenient: bool) -> Iterator[Record]:
    for record in records.read(path, is_lenient=is_lenient):
        if record.error:
            sys.stderr.write(f"passed over {record.where}: {record.error}\n")
        else:
            yield record
