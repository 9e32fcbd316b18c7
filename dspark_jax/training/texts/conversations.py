"""Conversations to ids and loss masks, by DeepSpec's rule; everything is counted.

A chat is rendered as one text. What follows an assistant's header, up to and including
the end of the turn, is supervised; characters become token indices by the length of the
encoded text before them. DeepSpec encodes every such prefix anew, which is quadratic in
the number of turns; here only the piece since the last turn's beginning is encoded,
with the same result: a control token cuts a text into pieces that are encoded alone.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dspark_jax.targets import chatml
from dspark_jax.training.texts.corpus_writer import CorpusWriter
from dspark_jax.training.texts.records import Record

HEADER = f"{chatml.TURN_START}assistant\n"
END = f"{chatml.TURN_END}\n"
# "$" also stands before a newline at the very end, as in DeepSpec.
ANSWER = re.compile(f"{re.escape(HEADER)}([\\s\\S]*?(?:{re.escape(END)}|$))")
# The system turn that DeepSpec's template of that name puts in where there is none.
TEMPLATES = {"own": None, "qwen": "You are a helpful assistant."}
MIN_LOSS_TOKENS = 14
_BATCH = 256  # rows of one length that are written at a time


@runtime_checkable
class TextTokenizer(Protocol):
    """What is needed of a tokenizer (`dspark_jax.load_tokenizer` gives one)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, control tokens recognised."""

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a chat."""


@dataclasses.dataclass
class Counts:
    """What became of every record; dropped ones by reason."""

    num_records: int = 0
    num_rows: int = 0
    num_truncated: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_with_marks: int = 0  # messages that hold the template's own marks
    dropped_malformed: int = 0
    dropped_failed: int = 0  # "status": "error"
    dropped_unsupervised: int = 0
    dropped_too_few: int = 0

    def report(self) -> str:
        """A few lines for a person."""
        share = 100 * self.num_supervised / max(self.num_tokens, 1)
        dropped = {
            "malformed": self.dropped_malformed,
            "marked as failed": self.dropped_failed,
            "without supervised tokens": self.dropped_unsupervised,
            "with too few of them": self.dropped_too_few,
        }
        lines = [
            f"{self.num_records} records read, {self.num_rows} rows kept, "
            f"{self.num_truncated} of them truncated",
            f"{self.num_tokens} tokens, {self.num_supervised} supervised "
            f"({share:.1f} %)",
            f"{sum(dropped.values())} records dropped: "
            + ", ".join(f"{count} {why}" for why, count in dropped.items()),
        ]
        if self.num_with_marks:
            lines.append(
                f"{self.num_with_marks} records hold chat marks in a message: they "
                "are read as turns, as in DeepSpec"
            )
        return "\n".join(lines)


def tokenize(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, str]],
    *,
    max_length: int,
    template: str = "own",
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Ids int32 [S] and loss mask bool [S] of a chat, and whether it was truncated.

    Args:
      max_length: longer chats lose their end.
      template: "qwen" puts DeepSpec's system turn before a chat that has none; "own"
        leaves that to the tokenizer's template.

    Raises:
      ValueError: an unknown template, or a message that cannot be rendered.
    """
    text = tokenizer.render_chat(with_system(messages, template))
    ids = tokenizer.encode(text, add_special_tokens=False)
    mask = np.zeros(min(len(ids), max_length), np.bool_)
    spans = [match.span(1) for match in ANSWER.finditer(text)]
    edges = [edge for span in spans for edge in span]
    indices = _token_indices(tokenizer, text, ids, edges)
    for begin, end in zip(indices[::2], indices[1::2], strict=True):
        mask[begin:end] = True
    return np.asarray(ids[:max_length], np.int32), mask, len(ids) > max_length


def with_system(
    messages: Sequence[Mapping[str, str]], template: str
) -> Sequence[Mapping[str, str]]:
    """The messages, with the template's system turn where they have none."""
    if template not in TEMPLATES:
        raise ValueError(
            f"`template` must be one of {tuple(TEMPLATES)}, got {template!r}"
        )
    default = TEMPLATES[template]
    if default is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": default}, *messages]


def write_corpus(
    records: Iterator[Record],
    tokenizer: TextTokenizer,
    writer: CorpusWriter,
    *,
    max_length: int,
    lengths: Sequence[int],
    template: str = "own",
    min_loss_tokens: int = MIN_LOSS_TOKENS,
    log: Callable[[Counts], Any] = lambda counts: None,
) -> Counts:
    """Tokenises records into a corpus folder; rows go to the least length that fits.

    Args:
      lengths: of the rows; the last one must be `max_length`.
      min_loss_tokens: rows with fewer supervised tokens are dropped, and counted.
      log: called with the counts after every 1000 records.

    Raises:
      ValueError: a chat that cannot be rendered, named as file:line.
    """
    lengths = check_lengths(lengths, max_length)
    counts = Counts()
    waiting: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {n: [] for n in lengths}

    def flush(length: int) -> None:
        rows = waiting[length]
        if rows:
            writer.add(*pad_rows(rows), length=length)
            rows.clear()

    for record in records:
        counts.num_records += 1
        row = _row(record, tokenizer, counts, max_length, template, min_loss_tokens)
        if row is not None:
            length = next(n for n in lengths if n >= row[0].shape[0])
            waiting[length].append(row)
            if len(waiting[length]) >= _BATCH:
                flush(length)
        if counts.num_records % 1000 == 0:
            log(counts)
    for length in lengths:
        flush(length)
    writer.commit(dataclasses.asdict(counts))
    return counts


def check_lengths(lengths: Sequence[int], max_length: int) -> tuple[int, ...]:
    """Row lengths in order; raises ValueError unless the last one is `max_length`."""
    found = tuple(sorted(set(lengths)))
    if not found or found[0] < 1 or found[-1] != max_length:
        raise ValueError(
            f"`lengths` must be positive and end with {max_length}, got "
            f"{tuple(lengths)}"
        )
    return found


def default_lengths(max_length: int) -> tuple[int, ...]:
    """`max_length`, its half, quarter and so on, down to 128."""
    found = [max_length]
    while found[-1] >= 256:
        found.append(-(-found[-1] // 2))
    return tuple(reversed(found))


def pad_rows(
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [N, S] and masks bool [N, S] of rows of several lengths."""
    width = max(ids.shape[0] for ids, _ in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), np.bool_)
    for index, (ids, supervised) in enumerate(rows):
        tokens[index, : ids.shape[0]] = ids
        mask[index, : ids.shape[0]] = supervised
    return tokens, mask


def _row(
    record: Record,
    tokenizer: TextTokenizer,
    counts: Counts,
    max_length: int,
    template: str,
    min_loss_tokens: int,
) -> tuple[np.ndarray, np.ndarray] | None:
    """One record's row, or None and the reason counted."""
    if record.error:
        counts.dropped_malformed += 1
        return None
    if record.status == "error":
        counts.dropped_failed += 1
        return None
    marks = (chatml.TURN_START, chatml.TURN_END)
    texts = [message["content"] for message in record.messages]
    counts.num_with_marks += any(mark in text for mark in marks for text in texts)
    try:
        ids, mask, is_truncated = tokenize(
            tokenizer, record.messages, max_length=max_length, template=template
        )
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error
    num_supervised = int(mask.sum())
    if num_supervised < max(min_loss_tokens, 1):
        if num_supervised:
            counts.dropped_too_few += 1
        else:
            counts.dropped_unsupervised += 1
        return None
    counts.num_rows += 1
    counts.num_truncated += is_truncated
    counts.num_tokens += int(ids.shape[0])
    counts.num_supervised += num_supervised
    return ids, mask


def _token_indices(
    tokenizer: TextTokenizer, text: str, ids: Sequence[int], edges: Sequence[int]
) -> list[int]:
    """len(encode(text[:edge])) for every edge."""

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    starts = [m.start() for m in re.finditer(re.escape(chatml.TURN_START), text)]
    if not starts or starts[0] != 0:
        starts.insert(0, 0)
    pieces = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    encoded = [encode(piece) for piece in pieces]
    is_cut = len(encode(chatml.TURN_START)) == 1
    if not is_cut or [i for piece in encoded for i in piece] != list(ids):
        return [len(encode(text[:edge])) for edge in edges]
    before = np.cumsum([0, *map(len, encoded)])
    found, piece = [], 0
    for edge in edges:
        while piece + 1 < len(starts) and starts[piece + 1] < edge:
            piece += 1
        found.append(int(before[piece]) + len(encode(text[starts[piece] : edge])))
    return found
