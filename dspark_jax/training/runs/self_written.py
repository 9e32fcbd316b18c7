"""The corpus that the target writes itself at the start of a run."""

import functools

import jax
import numpy as np

from dspark_jax.training.runs import saving, training_data
from dspark_jax.training.runs.progress import Progress
from dspark_jax.training.runs.run_config import RunConfig
from dspark_jax.training.runs.run_folder import RunFolder
from dspark_jax.training.runs.stopping import Stop
from dspark_jax.training.runs.training_data import TrainingData
from dspark_jax.training.texts import corpus, data
from dspark_jax.training.texts.data import Rows
from dspark_jax.types import PyTree, Target


def prepare(
    folder: RunFolder,
    config: RunConfig,
    target: Target,
    target_params: PyTree,
    tokenizer: corpus.ChatTokenizer,
    *,
    num_batches: int | None,
    progress: Progress,
    stop: Stop,
) -> tuple[TrainingData, int] | None:
    """The run's corpus: read if it was written before, else written and saved.

    Args:
      num_batches: None writes until a budget is spent; else exactly so many, which
        gives the rows of an earlier start again.

    Returns:
      The data and the number of batches; None if a stop was asked for meanwhile.
    """
    if folder.corpus.is_file():
        rows, count = saving.load_rows(folder.corpus)
    else:
        rows, count = _write(
            config,
            target,
            target_params,
            tokenizer,
            num_batches=num_batches,
            progress=progress,
            stop=stop,
        )
        if stop.is_asked:
            return None
        saving.save_rows(folder.corpus, rows, count)
    found = training_data.of_rows(
        rows,
        seed=config.seed,
        batch_rows=config.batch_rows,
        held_out_rows=config.held_out_rows,
        vocab_size=target.config.vocab_size,
    )
    return found, count


def _write(
    config: RunConfig,
    target: Target,
    target_params: PyTree,
    tokenizer: corpus.ChatTokenizer,
    *,
    num_batches: int | None,
    progress: Progress,
    stop: Stop,
) -> tuple[Rows, int]:
    how = corpus.data_config(
        tokenizer,
        length=config.row_length,
        max_user=config.max_user,
        banned=config.never_sampled,
    )
    shared = len(corpus.chat_tokens(tokenizer).shared)
    if shared + config.max_prefix >= config.row_length:
        raise ValueError(
            f"row_length must be above max_prefix and the {shared} tokens that every "
            f"chat begins with, got {config.row_length} and max_prefix = "
            f"{config.max_prefix}"
        )
    compiled = jax.jit(
        functools.partial(data.write_rows, target=target, config=how),
    )

    def write_rows(key, shared, prefixes):
        return compiled(key, shared, prefixes, target_params)

    try:
        rows, count = corpus.write(
            config.seed,
            tokenizer,
            write_rows,
            vocab_size=target.config.vocab_size,
            batch=config.write_rows,
            max_prefix=config.max_prefix,
            max_batches=num_batches or config.max_rows // config.write_rows,
            seconds=config.write_seconds if num_batches is None else float("inf"),
            log=progress.log,
            is_stopped=lambda: stop.is_asked,
        )
    except jax.errors.JaxRuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        raise ValueError(
            f"write_rows = {config.write_rows} rows of {config.row_length} tokens do "
            "not fit the device's memory, write fewer at a time (32, say)"
        ) from error
    return jax.tree.map(np.asarray, rows), count
