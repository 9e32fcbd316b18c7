"""Answers by the target itself for given prompts: what a drafter should be trained on.

A drafter learns the target's words, not somebody's: every user turn of a record is
answered in turn, in batches on the device, by plain decoding or with a drafter. A
record's noise follows from the seed and its id, so the batch that it is in changes
nothing. The corpus folder has the exact ids (decoding and encoding again may differ);
`conversations.jsonl` beside it has the text, and says which ids are done.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import types
from dspark_jax.config import Speculation
from dspark_jax.decoding import generate
from dspark_jax.sampling import Sampling
from dspark_jax.targets import tokenizer as tokenizer_lib
from dspark_jax.training import conversations, corpus
from dspark_jax.training import records as records_lib
from dspark_jax.training.corpus_writer import CorpusWriter
from dspark_jax.training.records import Record, RecordWriter
from dspark_jax.types import Drafter, PyTree, Target

CONVERSATIONS = "conversations.jsonl"
# Records that are sorted by length before they are put into batches, in batches.
_SORTED = 16


class Models(NamedTuple):
    """What answers; without a drafter by plain decoding."""

    target: Target
    target_params: PyTree
    drafter: Drafter | None = None
    drafter_params: PyTree = None
    options: Speculation = Speculation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerationConfig:
    """How answers are drawn and kept.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k, top_p, min_p: cuts, or None.
      max_new_tokens: of an answer; a conversation ends with an answer that is cut.
      batch_rows: records that are answered at a time.
      max_length: tokens of a row; longer conversations lose their end.
      min_loss_tokens: rows with fewer answer tokens are dropped.
      enable_thinking: for templates that know thoughts.
    """

    seed: int = 0
    temperature: float = 0.7
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int = 512
    batch_rows: int = 32
    max_length: int = 2048
    min_loss_tokens: int = conversations.MIN_LOSS_TOKENS
    enable_thinking: bool = False

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_rows", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )

    def sampling(self) -> Sampling:
        """The settings as traced numbers: one program serves every temperature."""
        if self.temperature == 0:
            return Sampling()
        values = {
            "temperature": (self.temperature, np.float32),
            "top_k": (self.top_k, np.int32),
            "top_p": (self.top_p, np.float32),
            "min_p": (self.min_p, np.float32),
        }
        return Sampling(
            **{
                name: np.asarray(value, dtype)
                for name, (value, dtype) in values.items()
                if value is not None
            }
        )


@runtime_checkable
class Tokenizer(corpus.ChatTokenizer, conversations.TextTokenizer, Protocol):
    """What is needed of a tokenizer (`dspark_jax.load_tokenizer` gives one)."""

    @property
    def chat(self) -> tokenizer_lib.ChatFormat | None:
        """What the template adds to the turns."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""


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


@dataclasses.dataclass
class _Chat:
    """One record while it is answered."""

    record: Record
    messages: list[dict[str, str]]
    waiting: list[str]  # user turns that are not yet answered
    ids: list[int] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    is_cut: bool = False  # the last answer
    dropped: str = ""


def regenerate(
    folder: str | os.PathLike,
    records: Iterable[Record],
    models: Models,
    tokenizer: Tokenizer,
    config: RegenerationConfig,
    *,
    lengths: Sequence[int] | None = None,
    resume: bool = False,
    log: Callable[[Counts], Any] = lambda counts: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Counts:
    """Answers every record; those whose ids are done already are passed over.

    Args:
      lengths: of the corpus's rows; None: `conversations.default_lengths`.
      log: called after every batch, which is committed.
      should_stop: asked after every batch.

    Raises:
      FileExistsError: a corpus is there, and `resume` is false.
      ValueError: an id that is used twice, or a chat that cannot be rendered.
    """
    lengths = conversations.check_lengths(
        lengths or conversations.default_lengths(config.max_length), config.max_length
    )
    folder = pathlib.Path(folder)
    answer = _Answerer(models, tokenizer, config)
    target = models.target.config
    with CorpusWriter(
        folder,
        vocab_size=target.vocab_size,
        fingerprint=target.fingerprint,
        seed=config.seed,
        resume=resume,
    ) as writer:
        counts = writer.progress(dataclasses.asdict(config), Counts())
        path = folder / CONVERSATIONS
        with RecordWriter(path, counts.num_records) as out:
            done = {record.name for record in records_lib.read(path)}
            pending = _unanswered(records, done)
            while chosen := list(
                itertools.islice(pending, _SORTED * config.batch_rows)
            ):
                chosen.sort(key=lambda record: _size(record.messages))
                for begin in range(0, len(chosen), config.batch_rows):
                    batch = chosen[begin : begin + config.batch_rows]
                    chats = [_Chat(r, *_questions(r)) for r in batch]
                    answer.all_turns(chats, counts)
                    for chat in chats:
                        _finish(chat, tokenizer, writer, out, counts, config, lengths)
                    out.sync()
                    writer.commit(dataclasses.asdict(counts))
                    log(counts)
                    if should_stop():
                        return counts
    return counts


class _Answerer:
    """Compiled generation, and the ids of turns."""

    def __init__(
        self, models: Models, tokenizer: Tokenizer, config: RegenerationConfig
    ):
        self._models, self._tokenizer, self._config = models, tokenizer, config
        self._last = models.target.config.max_position
        stops = {*tokenizer.stop_tokens, *models.target.config.stop_tokens}
        self._stop_tokens = np.asarray(sorted(stops) or [-1], np.int32)
        self._chat = corpus.chat_tokens(tokenizer)
        static: dict[str, Any] = {
            "target": models.target,
            "max_new_tokens": config.max_new_tokens,
        }
        function: Any = generate.autoregressive_generate
        if models.drafter is not None:
            function = generate.speculative_generate
            static |= {"drafter": models.drafter, "options": models.options}
        self._generate = jax.jit(functools.partial(function, **static))

    def all_turns(self, chats: Sequence[_Chat], counts: Counts) -> None:
        """Answers every user turn of these records, one turn of all at a time."""
        while asking := [chat for chat in chats if chat.waiting and not chat.dropped]:
            fed = []
            for chat in asking:
                self._ask(chat)
                if len(chat.ids) > self._last:
                    # No position is left for an answer to this turn.
                    chat.messages.pop()
                    chat.waiting.clear()
                    if not any(m["role"] == "assistant" for m in chat.messages):
                        chat.dropped = "too_long"
                else:
                    fed.append(chat)
            if fed:
                self._answer(fed, counts)

    def _ask(self, chat: _Chat) -> None:
        """Appends the next user turn, and the head of an answer."""
        message = {"role": "user", "content": chat.waiting.pop(0)}
        options = {"enable_thinking": self._config.enable_thinking}
        encode: Any = self._tokenizer.encode_chat
        if not chat.ids or _drops_thoughts(self._tokenizer):
            new = encode([*chat.messages, message], **options)
            chat.ids, chat.mask = [], []
        else:
            # Turns are encoded one by one, so the new one is what it adds to another.
            other = [{"role": "system", "content": ""}]
            before = encode(other, add_generation_prompt=False)
            end = self._chat.end_of_turn
            closing = [] if chat.ids[-1] == end else [end]
            newline = self._chat.to_answer[:1]
            new = [
                *closing,
                *newline,
                *encode([*other, message], **options)[len(before) :],
            ]
        chat.messages.append(message)
        chat.ids += new
        chat.mask += [False] * len(new)

    def _answer(self, chats: Sequence[_Chat], counts: Counts) -> None:
        batch = self._config.batch_rows
        width = min(_bucket(max(len(chat.ids) for chat in chats)), self._last)
        tokens = np.zeros((batch, width), np.int32)
        sizes, limits = np.ones(batch, np.int32), np.zeros(batch, np.int32)
        names = np.zeros(batch, np.uint32)
        for row, chat in enumerate(chats):
            tokens[row, : len(chat.ids)] = chat.ids
            sizes[row], limits[row] = len(chat.ids), self._config.max_new_tokens
            names[row] = _number(chat.record.name)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(self._config.seed), jnp.asarray(names)
        )
        arguments: dict[str, Any] = {"target_params": self._models.target_params}
        if self._models.drafter is not None:
            arguments["drafter_params"] = self._models.drafter_params
        found = self._generate(
            keys,
            tokens,
            sizes,
            limits=limits,
            sampling=self._config.sampling(),
            stop_tokens=self._stop_tokens,
            **arguments,
        )
        out, ends, finish = jax.device_get((found.tokens, found.lengths, found.finish))
        for row, chat in enumerate(chats):
            if finish[row] == types.FINISH_NON_FINITE:
                chat.dropped = "non_finite"
                continue
            answer = out[row, sizes[row] : ends[row]].tolist()
            chat.ids += answer
            chat.mask += [True] * len(answer)
            is_cut = finish[row] != types.FINISH_STOP
            text = self._tokenizer.decode(answer if is_cut else answer[:-1])
            chat.messages.append({"role": "assistant", "content": text})
            counts.num_answers += 1
            if is_cut:
                counts.num_cut += 1
                chat.is_cut = True
                chat.waiting.clear()


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
    chat: _Chat,
    tokenizer: Tokenizer,
    writer: CorpusWriter,
    out: RecordWriter,
    counts: Counts,
    config: RegenerationConfig,
    lengths: tuple[int, ...],
) -> None:
    """Writes one record's text, and its row unless it is dropped."""
    counts.num_records += 1
    ids, mask = np.asarray(chat.ids, np.int32), np.asarray(chat.mask, np.bool_)
    is_truncated = len(ids) > config.max_length
    ids, mask = ids[: config.max_length], mask[: config.max_length]
    num_answers = sum(m["role"] == "assistant" for m in chat.messages)
    if num_answers > 1 and _drops_thoughts(tokenizer):
        # What was fed is not one text: each turn has shown its own thoughts only.
        ids, mask, is_truncated = conversations.tokenize(
            tokenizer, chat.messages, max_length=config.max_length
        )
        if chat.is_cut and not is_truncated:
            mask[-2:] = False  # the target has not written this end of turn
    if not chat.dropped and not chat.ids:
        chat.dropped = "no_user"
    elif not chat.dropped and mask.sum() < max(config.min_loss_tokens, 1):
        chat.dropped = "too_few"
    values: dict[str, Any] = {"id": chat.record.name, "conversations": chat.messages}
    if chat.dropped:
        name = f"dropped_{chat.dropped}"
        setattr(counts, name, getattr(counts, name) + 1)
        values |= {"status": "error", "error": chat.dropped}
        if not chat.messages:
            values["conversations"] = list(chat.record.messages)
        out.write(values)
        return
    out.write(values | {"status": "success"})
    length = next(n for n in lengths if n >= len(ids))
    writer.add(ids[None], mask[None], length=length)
    counts.num_rows += 1
    counts.num_truncated += is_truncated
    counts.num_tokens += len(ids)
    counts.num_supervised += int(mask.sum())


def _drops_thoughts(tokenizer: Tokenizer) -> bool:
    return tokenizer.chat is not None and tokenizer.chat.drops_thoughts


def _size(messages: Sequence[dict[str, str]]) -> int:
    """Characters up to the first answer: about the length of the first prompt."""
    asked = itertools.takewhile(lambda m: m["role"] != "assistant", messages)
    return sum(len(message["content"]) for message in asked)


def _number(name: str) -> int:
    """32 bits of a record's id."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest())


def _bucket(size: int) -> int:
    """The least of 32, 48, 64, 96, 128, … that is at least `size`."""
    power = 32
    while power < size:
        if size <= power * 3 // 2:
            return power * 3 // 2
        power *= 2
    return power
