"""Answers by the target itself for given prompts: what a drafter should be trained on.

A drafter learns the target's words, not somebody's: every user turn of a record is
answered in turn (`answers`). The corpus folder has the exact ids, which decoding and
encoding again may change; `conversations.jsonl` beside it has the text, and says which
records are done.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from dspark_jax.training.texts import answers, conversations
from dspark_jax.training.texts import records as records_lib
from dspark_jax.training.texts.answers import AnswerConfig, Chat, Models, Tokenizer
from dspark_jax.training.texts.corpus_writer import CorpusWriter
from dspark_jax.training.texts.records import Record, RecordWriter

CONVERSATIONS = "conversations.jsonl"
# Records that are sorted by length before they are put into batches, in batches.
_SORTED = 16


@dataclasses.dataclass
class Counts:
    """What became of every record."""

    num_records: int = 0
    num_rows: int = 0
    num_answers: int = 0
    num_cut: int = 0  # answers that reached max_new_tokens
    num_truncated: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    dropped_no_user: int = 0  # no user turn to answer
    dropped_too_long: int = 0  # the first prompt fills the target's positions
    dropped_too_few: int = 0
    dropped_non_finite: int = 0  # the target's logits were NaN or infinite
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def report(self) -> str:
        """A few lines for a person."""
        dropped = {
            "without a user turn": self.dropped_no_user,
            "too long": self.dropped_too_long,
            "with too few answer tokens": self.dropped_too_few,
            "with non-finite logits": self.dropped_non_finite,
        }
        reasons = ", ".join(f"{count} {why}" for why, count in dropped.items())
        return (
            f"{self.num_records} records, {self.num_answers} answers "
            f"({self.num_cut} cut), {self.num_rows} rows kept "
            f"({self.num_truncated} truncated)\n"
            f"{self.num_tokens} tokens, {self.num_supervised} of answers\n"
            f"{sum(dropped.values())} records dropped: {reasons}"
        )


def regenerate(
    folder: str | os.PathLike,
    records: Iterable[Record],
    models: Models,
    tokenizer: Tokenizer,
    config: AnswerConfig,
    *,
    max_length: int = 2048,
    lengths: Sequence[int] | None = None,
    min_loss_tokens: int = conversations.MIN_LOSS_TOKENS,
    resume: bool = False,
    log: Callable[[Counts], Any] = lambda counts: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Counts:
    """Answers every record; those whose ids are done already are passed over.

    Args:
      max_length: of a row; longer conversations lose their end.
      lengths: of the corpus's rows; None: `conversations.default_lengths`.
      min_loss_tokens: rows with fewer answer tokens are dropped.
      log: called after every batch, which is committed.
      should_stop: asked after every batch.

    Raises:
      FileExistsError: a corpus is there, and `resume` is false.
      ValueError: an id that is used twice, or a chat that cannot be rendered.
    """
    lengths = conversations.check_lengths(
        lengths or conversations.default_lengths(max_length), max_length
    )
    folder = pathlib.Path(folder)
    answer = answers.Answerer(models, tokenizer, config)
    target = models.target.config
    with CorpusWriter(
        folder,
        vocab_size=target.vocab_size,
        fingerprint=target.fingerprint,
        seed=config.seed,
        resume=resume,
    ) as writer:
        settings = dataclasses.asdict(config) | {
            "lengths": lengths,
            "min_loss_tokens": min_loss_tokens,
        }
        counts = writer.progress(settings, Counts())
        path = folder / CONVERSATIONS
        with RecordWriter(path, counts.num_records) as out:
            finish = functools.partial(
                _finish,
                tokenizer=tokenizer,
                writer=writer,
                out=out,
                counts=counts,
                lengths=lengths,
                min_loss_tokens=min_loss_tokens,
            )
            done = {record.name for record in records_lib.read(path)}
            pending = _unanswered(records, done)
            while chosen := list(
                itertools.islice(pending, _SORTED * config.batch_rows)
            ):
                chosen.sort(key=lambda record: _size(record.messages))
                for begin in range(0, len(chosen), config.batch_rows):
                    batch = chosen[begin : begin + config.batch_rows]
                    chats = [Chat(r.name, *_questions(r)) for r in batch]
                    answer.all_turns(chats)
                    for chat, record in zip(chats, batch, strict=True):
                        finish(chat, record.messages)
                    out.sync()
                    writer.commit(dataclasses.asdict(counts))
                    log(counts)
                    if should_stop():
                        return counts
    return counts


def _unanswered(records: Iterable[Record], done: set[str]) -> Iterator[Record]:
    seen: dict[str, str] = {}
    for record in records:
        if record.name in seen:
            raise ValueError(
                f"{record.where}: id {record.name!r} was used before, in "
                f"{seen[record.name]}"
            )
        seen[record.name] = record.where
        if record.name not in done:
            yield record


def _questions(record: Record) -> tuple[list[dict[str, str]], list[str]]:
    """The system turn, if there is one, and the user turns."""
    system = [m for m in record.messages if m["role"] == "system"]
    users = [m["content"] for m in record.messages if m["role"] == "user"]
    return system, users


def _finish(
    chat: Chat,
    asked: Sequence[dict[str, str]],
    *,
    tokenizer: Tokenizer,
    writer: CorpusWriter,
    out: RecordWriter,
    counts: Counts,
    lengths: tuple[int, ...],
    min_loss_tokens: int,
) -> None:
    """Writes one record's text, and its row unless it is dropped."""
    counts.num_records += 1
    counts.num_cut += chat.is_cut
    ids, mask = np.asarray(chat.ids, np.int32), np.asarray(chat.mask, np.bool_)
    is_truncated = len(ids) > lengths[-1]
    ids, mask = ids[: lengths[-1]], mask[: lengths[-1]]
    num_answers = sum(m["role"] == "assistant" for m in chat.messages)
    counts.num_answers += num_answers
    if num_answers > 1 and answers.drops_thoughts(tokenizer):
        # What was fed is not one text: each turn has shown its own thoughts only.
        ids, mask, is_truncated = conversations.tokenize(
            tokenizer, chat.messages, max_length=lengths[-1]
        )
        if chat.is_cut and not is_truncated:
            mask[-2:] = False  # the target has not written this end of turn
    if not chat.dropped and not chat.ids:
        chat.dropped = "no_user"
    elif not chat.dropped and mask.sum() < max(min_loss_tokens, 1):
        chat.dropped = "too_few"
    if chat.dropped:
        name = f"dropped_{chat.dropped}"
        setattr(counts, name, getattr(counts, name) + 1)
    note = {"status": "error", "error": chat.dropped}
    out.write(
        {
            "id": chat.name,
            "conversations": chat.messages or list(asked),
            **(note if chat.dropped else {"status": "success"}),
        }
    )
    if chat.dropped:
        return
    length = next(n for n in lengths if n >= len(ids))
    writer.add(ids[None], mask[None], length=length)
    counts.num_rows += 1
    counts.num_truncated += is_truncated
    counts.num_tokens += len(ids)
    counts.num_supervised += int(mask.sum())


def _size(messages: Sequence[dict[str, str]]) -> int:
    """Characters up to the first answer: about the length of the first prompt."""
    asked = itertools.takewhile(lambda m: m["role"] != "assistant", messages)
    return sum(len(message["content"]) for message in asked)
