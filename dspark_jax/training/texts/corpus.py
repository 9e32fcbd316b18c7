"""Batches of self-written rows: prefixes on the host, rows on the device.

Batch i depends on (seed, i) only, so a corpus is known by its seed and the number of
its batches: after a restart the same rows are written again.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.training.texts import prompts
from dspark_jax.training.texts.data import DataConfig, Prefixes, Rows

# Shares of the beginnings: bare user turn, user turn begun with an opening, prompt.
SHARES = (0.40, 0.15, 0.45)
BARE, OPENING = "bare", "opening"  # domains, beside those of `prompts`
Draw = Callable[[np.random.Generator, int], list[tuple[str, str]]]


@runtime_checkable
class ChatTokenizer(Protocol):
    """What is needed of a tokenizer (`dspark_jax.load_tokenizer` gives one)."""

    def encode_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat."""


class ChatTokens(NamedTuple):
    """The fixed parts of a chat, as ids."""

    shared: tuple[int, ...]  # every row starts with it: the system turn, "…user"
    begin_user: tuple[int, ...]  # what is left of the user's header
    end_of_turn: int
    to_answer: tuple[int, ...]  # after the end of a user turn
    to_user: tuple[int, ...]  # after the end of an answer


def chat_tokens(tokenizer: ChatTokenizer) -> ChatTokens:
    """Reads the fixed parts off two rendered chats (ChatML: every turn ends alike)."""
    empty = [{"role": "user", "content": ""}]
    closed = tokenizer.encode_chat(empty, add_generation_prompt=False)
    asking = tokenizer.encode_chat(empty)
    end, newline = closed[-2:]
    start = asking[len(closed)]
    header = len(closed) - 1 - closed[::-1].index(start)
    return ChatTokens(
        shared=tuple(closed[:-3]),
        begin_user=(closed[-3],),
        end_of_turn=end,
        to_answer=(newline, *asking[len(closed) :]),
        to_user=(newline, *closed[header:-2]),
    )


def make_prefixes(
    rng: np.random.Generator,
    tokenizer: ChatTokenizer,
    chat: ChatTokens,
    batch: int,
    max_prefix: int,
    draw: Draw | None = None,
) -> tuple[Prefixes, list[str]]:
    """What the rows of one batch start with, and the domain of each.

    Too long prompts become bare turns.

    Args:
      draw: (rng, count) -> (domain, text) of every row's prompt, instead of bare turns,
        openings and `prompts.make_prompts`.
    """
    beginnings = prompts.texts()["openings"]
    shares = SHARES if draw is None else (0.0, 0.0, 1.0)
    kinds = rng.choice(3, size=batch, p=shares)
    openings = rng.integers(len(beginnings), size=batch)
    found = (draw or prompts.make_prompts)(rng, int(np.sum(kinds == 2)))
    texts = iter(found)
    domains = [BARE] * batch
    tokens = np.zeros((batch, max_prefix), np.int32)
    lengths = np.ones(batch, np.int32)
    complete = np.zeros(batch, np.bool_)
    tokens[:, 0] = chat.begin_user[0]
    for row, (kind, opening) in enumerate(zip(kinds, openings, strict=True)):
        if kind == 0:
            continue
        domain, content = (OPENING, beginnings[opening]) if kind == 1 else next(texts)
        ids = tokenizer.encode_chat(
            [{"role": "user", "content": content}],
            add_generation_prompt=bool(kind == 2),
        )
        ids = ids[len(chat.shared) :]
        if kind == 1:
            ids = ids[:-2]  # the turn goes on
        if len(ids) > max_prefix:
            continue
        tokens[row, : len(ids)] = ids
        lengths[row] = len(ids)
        complete[row] = kind == 2
        domains[row] = domain
    prefixes = Prefixes(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray(lengths),
        is_complete=jnp.asarray(complete),
    )
    return prefixes, domains


def write(
    seed: int,
    tokenizer: ChatTokenizer,
    write_rows: Callable[[jax.Array, jax.Array, Prefixes], Rows],
    *,
    vocab_size: int,
    batch: int,
    max_prefix: int,
    max_batches: int,
    seconds: float,
    log: Callable[[str], Any],
    is_stopped: Callable[[], bool] = lambda: False,
) -> tuple[Rows, int]:
    """Writes batches until `max_batches` or `seconds` are spent; the first one counts.

    Args:
      write_rows: (key, shared, prefixes) -> Rows, compiled; see `data.write_rows`.
      is_stopped: asked after every batch; True ends the writing early.

    Returns:
      All rows, on the device (tokens uint16 where they fit), and the number of batches.
    """
    chat = chat_tokens(tokenizer)
    shared = jnp.asarray(chat.shared, jnp.int32)
    start = time.monotonic()
    done: list[Rows] = []
    while len(done) < max_batches:
        index = len(done)
        rng = np.random.default_rng([seed, index])
        prefixes, _ = make_prefixes(rng, tokenizer, chat, batch, max_prefix)
        if done:  # prefixes are made while the device writes the batch before
            jax.block_until_ready(done[-1])
            spent = time.monotonic() - start
            log(f"wrote {index * batch} rows in {spent:.1f} s")
            if spent + spent / index > seconds or is_stopped():
                break
        rows = write_rows(
            jax.random.fold_in(jax.random.key(seed), index), shared, prefixes
        )
        done.append(
            Rows(tokens=_narrow(rows.tokens, vocab_size), loss_mask=rows.loss_mask)
        )
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *done), len(done)


def write_batches(
    seed: int,
    tokenizer: ChatTokenizer,
    write_rows: Callable[[jax.Array, jax.Array, Prefixes], Rows],
    *,
    batch: int,
    max_prefix: int,
    start: int = 0,
    draw: Draw | None = None,
) -> Iterator[tuple[Rows, list[str]]]:
    """Batches from number `start` on, without end, with the domain of every row.

    The device writes the next batch while the caller looks at one; the next prefixes
    are made meanwhile too. A caller that stops leaves one batch unused.
    """
    chat = chat_tokens(tokenizer)
    shared = jnp.asarray(chat.shared, jnp.int32)

    def begin(index: int) -> tuple[Prefixes, list[str]]:
        rng = np.random.default_rng([seed, index])
        return make_prefixes(rng, tokenizer, chat, batch, max_prefix, draw)

    written: tuple[Rows, list[str]] | None = None
    for index in itertools.count(start):
        prefixes, domains = begin(index)
        key = jax.random.fold_in(jax.random.key(seed), index)
        rows = write_rows(key, shared, prefixes)  # returns before it is done
        if written is not None:
            yield written
        written = rows, domains


def data_config(tokenizer: ChatTokenizer, **settings: Any) -> DataConfig:
    """The DataConfig of this tokenizer's chats."""
    chat = chat_tokens(tokenizer)
    return DataConfig(
        end_of_turn=chat.end_of_turn,
        to_answer=chat.to_answer,
        to_user=chat.to_user,
        **settings,
    )


def _narrow(tokens: jax.Array, vocab_size: int) -> jax.Array:
    return tokens.astype(jnp.uint16) if vocab_size <= 2**16 else tokens
