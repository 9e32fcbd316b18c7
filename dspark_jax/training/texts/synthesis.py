"""A corpus that the target writes from nothing: its own prompts and its own answers.

Batches of rows come from `corpus.write_batches`; what is degenerate or already there is
dropped, and every drop is counted. Two files grow together: the corpus folder has the
exact ids, `conversations.jsonl` beside it is for people. Each batch is committed at
once, so that an interrupted run leaves a valid corpus and can be continued.
"""

import collections
import dataclasses
import hashlib
import itertools
import os
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from dspark_jax.targets import chatml
from dspark_jax.training.texts import corpus, corpus_files, data, repetition
from dspark_jax.training.texts.conversations import MIN_LOSS_TOKENS
from dspark_jax.training.texts.corpus_writer import CorpusWriter
from dspark_jax.training.texts.data import Rows
from dspark_jax.training.texts.records import RecordWriter
from dspark_jax.types import PyTree, Target

CONVERSATIONS = "conversations.jsonl"
_NOTED = 4096  # rows that are read at a time when a run is continued


@dataclasses.dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    """What is written and what is kept.

    Attributes:
      seed: batch i follows from (seed, i) and the sizes below.
      length: tokens of a row.
      batch_rows: rows that the device writes at a time.
      max_prefix: longest prompt in tokens; longer ones become bare user turns.
      max_user: tokens after which a sampled user turn is ended by force.
      temperatures, shares: of the answers; see `data.DataConfig`.
      max_repeated: rows with a greater share of repeated 20-grams are dropped.
      same_prompt: rows kept of one and the same first turn.
      min_loss_tokens: rows with fewer answer tokens are dropped.
      prompts: names the prompts of `draw`, for a run that is continued.
    """

    seed: int = 0
    length: int = 320
    batch_rows: int = 32
    max_prefix: int = 176
    max_user: int = 96
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    shares: tuple[float, ...] = (0.2, 0.35, 0.45)
    max_repeated: float = 0.3
    same_prompt: int = 4
    min_loss_tokens: int = MIN_LOSS_TOKENS
    prompts: str = ""

    def __post_init__(self):
        for name in ("batch_rows", "max_prefix", "max_user", "same_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if not 0 <= self.max_repeated <= 1:
            raise ValueError(
                f"max_repeated must lie in [0, 1], got {self.max_repeated}"
            )


@runtime_checkable
class Tokenizer(corpus.ChatTokenizer, Protocol):
    """What is needed of a tokenizer (`dspark_jax.load_tokenizer` gives one)."""

    @property
    def control_tokens(self) -> tuple[int, ...]:
        """Ids that only the template may write."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""


@dataclasses.dataclass
class Counts:
    """What became of the rows that were written; kept ones by domain."""

    num_batches: int = 0
    num_written: int = 0
    num_rows: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    dropped_too_few: int = 0
    dropped_empty_answer: int = 0
    dropped_repeated: int = 0
    dropped_same_conversation: int = 0
    dropped_same_prompt: int = 0
    domains: dict[str, int] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def report(self) -> str:
        """A few lines for a person."""
        names = [f for f in dataclasses.asdict(self) if f.startswith("dropped_")]
        dropped = ", ".join(
            f"{getattr(self, name)} {name.removeprefix('dropped_').replace('_', ' ')}"
            for name in names
        )
        domains = ", ".join(f"{n} {name}" for name, n in sorted(self.domains.items()))
        return (
            f"{self.num_written} rows written in {self.num_batches} batches, "
            f"{self.num_rows} kept ({domains})\n"
            f"{self.num_tokens} tokens, {self.num_supervised} of answers\n"
            f"{self.num_written - self.num_rows} rows dropped: {dropped}"
        )


def synthesize(
    folder: str | os.PathLike,
    target: Target,
    target_params: PyTree,
    tokenizer: Tokenizer,
    config: SynthesisConfig,
    *,
    seconds: float = float("inf"),
    num_tokens: float = float("inf"),
    resume: bool = False,
    draw: corpus.Draw | None = None,
    log: Callable[[Counts], Any] = lambda counts: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Counts:
    """Writes batches until a budget is spent; the first one counts.

    Args:
      seconds: no batch begins that would probably end later.
      num_tokens: of answers, in the corpus.
      resume: go on where an earlier run of the same settings stopped.
      draw: own prompts; see `corpus.make_prefixes`.
      log: called after every batch.
      should_stop: asked after every batch.

    Raises:
      FileExistsError: a corpus is there, and `resume` is false.
      ValueError: rows that the target or the prompts do not fit in.
    """
    how = _data_config(tokenizer, target, config)
    compiled = jax.jit(data.write_rows, static_argnames=("target", "config"))

    def write_rows(key, shared, prefixes):
        return compiled(key, shared, prefixes, target_params, target=target, config=how)

    folder = pathlib.Path(folder)
    with CorpusWriter(
        folder,
        vocab_size=target.config.vocab_size,
        fingerprint=target.config.fingerprint,
        seed=config.seed,
        resume=resume,
    ) as writer:
        counts = writer.progress(dataclasses.asdict(config), Counts())
        if counts.num_supervised >= num_tokens:
            return counts
        sieve = Sieve(config, how.end_of_turn)
        if counts.num_rows:
            for bucket in corpus_files.load_corpus(folder).buckets:
                for begin in range(0, bucket.num_rows, _NOTED):
                    sieve.note(bucket.take(slice(begin, begin + _NOTED)))
        with RecordWriter(folder / CONVERSATIONS, counts.num_rows) as records:
            batches = corpus.write_batches(
                config.seed,
                tokenizer,
                write_rows,
                batch=config.batch_rows,
                max_prefix=config.max_prefix,
                start=counts.num_batches,
                draw=draw,
            )
            start = time.monotonic()
            for done, (rows, domains) in enumerate(batches, 1):
                _keep(rows, domains, sieve, tokenizer, writer, records, counts)
                writer.commit(dataclasses.asdict(counts))
                log(counts)
                spent = time.monotonic() - start
                is_late = spent + spent / done > seconds
                if is_late or counts.num_supervised >= num_tokens or should_stop():
                    break
    return counts


class Sieve:
    """Says which rows to keep, and remembers what it kept."""

    def __init__(self, config: SynthesisConfig, end_of_turn: int):
        self._config = config
        self._end_of_turn = end_of_turn
        self._conversations: set[bytes] = set()
        self._prompts: collections.Counter[bytes] = collections.Counter()

    def reasons(self, rows: Rows) -> list[str]:
        """Why every row is dropped; "" for one that is kept."""
        tokens, mask = np.asarray(rows.tokens), np.asarray(rows.loss_mask)
        begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
        is_empty = np.any(begins & (tokens == self._end_of_turn), axis=1)
        is_short = mask.sum(axis=1) < self._config.min_loss_tokens
        shares = repetition.repeated_shares(tokens, mask)
        found = []
        for row in range(tokens.shape[0]):
            conversation, prompt = _names(tokens[row], mask[row])
            if is_empty[row]:
                reason = "empty_answer"
            elif is_short[row]:
                reason = "too_few"
            elif shares[row] > self._config.max_repeated:
                reason = "repeated"
            elif conversation in self._conversations:
                reason = "same_conversation"
            elif self._prompts[prompt] >= self._config.same_prompt:
                reason = "same_prompt"
            else:
                reason = ""
                self._add(conversation, prompt)
            found.append(reason)
        return found

    def note(self, rows: Rows) -> None:
        """Remembers rows that were kept before."""
        tokens, mask = np.asarray(rows.tokens), np.asarray(rows.loss_mask)
        for row in range(tokens.shape[0]):
            self._add(*_names(tokens[row], mask[row]))

    def _add(self, conversation: bytes, prompt: bytes) -> None:
        self._conversations.add(conversation)
        self._prompts[prompt] += 1


def split_turns(
    ids: np.ndarray, tokenizer: Tokenizer, chat: corpus.ChatTokens
) -> Iterator[tuple[str, str, bool]]:
    """(role, content, is it finished) of every turn of a row."""
    start = chat.to_answer[1]
    # Every turn begins with the template's mark.
    where = [*np.flatnonzero(ids == start).tolist(), len(ids)]
    for begin, end in itertools.pairwise(where):
        turn = ids[begin + 1 : end].tolist()
        is_finished = chat.end_of_turn in turn
        if is_finished:
            turn = turn[: turn.index(chat.end_of_turn)]
        role, newline, content = tokenizer.decode(turn).partition("\n")
        if newline and role in chatml.ROLES:
            yield role, content, is_finished


def _keep(
    rows: Rows,
    domains: list[str],
    sieve: Sieve,
    tokenizer: Tokenizer,
    writer: CorpusWriter,
    records: RecordWriter,
    counts: Counts,
) -> None:
    """Sorts one batch, and appends what is kept to both files."""
    rows = jax.tree.map(np.asarray, rows)
    tokens, mask = np.asarray(rows.tokens), np.asarray(rows.loss_mask)
    reasons = sieve.reasons(rows)
    kept = np.asarray([not reason for reason in reasons])
    chat = corpus.chat_tokens(tokenizer)
    for row, (reason, domain) in enumerate(zip(reasons, domains, strict=True)):
        if reason:
            name = f"dropped_{reason}"
            setattr(counts, name, getattr(counts, name) + 1)
            continue
        turns = list(split_turns(tokens[row], tokenizer, chat))
        records.write(
            {
                "id": f"{counts.num_batches}-{row}",
                "domain": domain,
                "is_cut": not turns[-1][2] if turns else True,
                "conversations": [
                    {"role": role, "content": content} for role, content, _ in turns
                ],
                "status": "success",
            }
        )
        counts.domains[domain] = counts.domains.get(domain, 0) + 1
    records.sync()
    writer.add(tokens[kept], mask[kept])
    counts.num_batches += 1
    counts.num_written += len(reasons)
    counts.num_rows += int(kept.sum())
    counts.num_tokens += int(kept.sum()) * tokens.shape[1]
    counts.num_supervised += int(mask[kept].sum())


def _data_config(
    tokenizer: Tokenizer, target: Target, config: SynthesisConfig
) -> data.DataConfig:
    """How rows are written; control tokens but the end of a turn are never sampled."""
    how = corpus.data_config(
        tokenizer,
        length=config.length,
        max_user=config.max_user,
        temperatures=config.temperatures,
        shares=config.shares,
    )
    last = target.config.max_position
    least = len(corpus.chat_tokens(tokenizer).shared) + config.max_prefix + 1
    if not least <= config.length <= last:
        raise ValueError(
            f"length must lie in {least}..{last} (the system turn and max_prefix, the "
            f"target's positions), got {config.length}"
        )
    banned = [
        index
        for index in tokenizer.control_tokens
        if index != how.end_of_turn and index < target.config.vocab_size
    ]
    return dataclasses.replace(how, banned=tuple(banned))


def _names(tokens: np.ndarray, mask: np.ndarray) -> tuple[bytes, bytes]:
    """Hashes of the whole row, and of what stands before its first answer."""
    first = int(np.argmax(mask)) if mask.any() else len(tokens)
    row = np.ascontiguousarray(tokens, np.int32)
    return _hash(row), _hash(row[:first])


def _hash(ids: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=12).digest()
