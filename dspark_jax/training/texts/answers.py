"""Answers of the target to whole conversations, a batch of records at a time.

Every user turn is answered in turn, by plain decoding or with a drafter. A record's
noise follows from the seed and its name, so the batch that it is in changes nothing.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import types
from dspark_jax.config import Speculation
from dspark_jax.decoding import generate
from dspark_jax.sampling import Sampling
from dspark_jax.targets import chatml
from dspark_jax.training.texts import conversations, corpus
from dspark_jax.types import Drafter, PyTree, Target


class Models(NamedTuple):
    """What answers; without a drafter by plain decoding."""

    target: Target
    target_params: PyTree
    drafter: Drafter | None = None
    drafter_params: PyTree = None
    options: Speculation = Speculation()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How answers are drawn.

    Attributes:
      temperature: 0 takes the most likely token.
      top_k, top_p, min_p: cuts, or None.
      max_new_tokens: of an answer; a conversation ends with an answer that is cut.
      batch_rows: records that are answered at a time.
      enable_thinking: for templates that know thoughts.
    """

    seed: int = 0
    temperature: float = 0.7
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_new_tokens: int = 512
    batch_rows: int = 32
    enable_thinking: bool = False

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_rows"):
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
    def chat(self) -> chatml.ChatFormat | None:
        """What the template adds to the turns."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        """Text of ids."""


@dataclasses.dataclass
class Chat:
    """One record while it is answered.

    Attributes:
      messages: the system turn, if there is one; turns and answers are added.
      waiting: user turns that are not yet answered.
      ids, mask: the whole chat, and what of it the target wrote.
      is_cut: the last answer reached its limit.
      dropped: why the record is not used.
    """

    name: str
    messages: list[dict[str, str]]
    waiting: list[str]  # user turns that are not yet answered
    ids: list[int] = dataclasses.field(default_factory=list)
    mask: list[bool] = dataclasses.field(default_factory=list)
    is_cut: bool = False  # the last answer
    dropped: str = ""


class Answerer:
    """Compiled generation, and the ids of turns."""

    def __init__(self, models: Models, tokenizer: Tokenizer, config: AnswerConfig):
        self._tokenizer, self._config = tokenizer, config
        self._last = models.target.config.max_position
        stops = {*tokenizer.stop_tokens, *models.target.config.stop_tokens}
        self._chat = corpus.chat_tokens(tokenizer)
        self._inputs: dict[str, Any] = {
            "target": models.target,
            "target_params": models.target_params,
            "max_new_tokens": config.max_new_tokens,
            "sampling": config.sampling(),
            "stop_tokens": np.asarray(sorted(stops) or [-1], np.int32),
        }
        if models.drafter is not None:
            self._inputs |= {
                "drafter": models.drafter,
                "drafter_params": models.drafter_params,
                "options": models.options,
            }
        self._generate = _compiled(models.drafter is not None)

    def all_turns(self, chats: Sequence[Chat]) -> None:
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
                self._answer(fed)

    def _ask(self, chat: Chat) -> None:
        """Appends the next user turn, and the head of an answer."""
        message = {"role": "user", "content": chat.waiting.pop(0)}
        options = {"enable_thinking": self._config.enable_thinking}
        encode: Any = self._tokenizer.encode_chat
        if not chat.ids or drops_thoughts(self._tokenizer):
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

    def _answer(self, chats: Sequence[Chat]) -> None:
        batch = self._config.batch_rows
        width = min(_bucket(max(len(chat.ids) for chat in chats)), self._last)
        tokens = np.zeros((batch, width), np.int32)
        sizes, limits = np.ones(batch, np.int32), np.zeros(batch, np.int32)
        names = np.zeros(batch, np.uint32)
        for row, chat in enumerate(chats):
            tokens[row, : len(chat.ids)] = chat.ids
            sizes[row], limits[row] = len(chat.ids), self._config.max_new_tokens
            names[row] = _number(chat.name)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(
            jax.random.key(self._config.seed), jnp.asarray(names)
        )
        found = self._generate(keys, tokens, sizes, limits=limits, **self._inputs)
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
            if is_cut:
                chat.is_cut = True
                chat.waiting.clear()


@functools.cache
def _compiled(is_speculative: bool) -> Any:
    """One program serves every answerer of the same models and shapes."""
    static = ["target", "max_new_tokens"]
    if not is_speculative:
        return jax.jit(generate.autoregressive_generate, static_argnames=static)
    static += ["drafter", "options"]
    return jax.jit(generate.speculative_generate, static_argnames=static)


def drops_thoughts(tokenizer: Tokenizer) -> bool:
    """Whether a turn's ids depend on the turns that follow it."""
    return tokenizer.chat is not None and tokenizer.chat.drops_thoughts


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
