"""Tokenizers of targets: text to ids, chats to ids, and ids to text as they arrive.

Built with the `tokenizers` package from a GGUF file or a folder's tokenizer.json;
`chatml.py` renders the chats. In a chat the text of a message never becomes a control
token: only the template's own marks do, so a user who writes "<|im_end|>" ends nothing.
(Added tokens that a tokenizer does not mark special, such as Qwen3's "<think>", are
still recognised: they control nothing.)
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers

from dspark_jax import tensor_files
from dspark_jax.targets import chatml, fetch, gguf, gguf_llama, hf_config

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back; see `load_tokenizer`.

    Attributes:
      stop_tokens: ids that end a text.
      chat: how chats are rendered; None: the template is not one that is supported.
    """

    stop_tokens: tuple[int, ...]
    chat: chatml.ChatFormat | None
    _backend: tokenizers.Tokenizer
    _literal: tokenizers.Tokenizer  # the same, control tokens not recognised

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def control_tokens(self) -> tuple[int, ...]:
        """Ids of the tokens that are marked special."""
        added = self._backend.get_added_tokens_decoder()
        return tuple(sorted(i for i, token in added.items() if token.special))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; control tokens written in it are recognised.

        `add_special_tokens=False` leaves out what the tokenizer itself would put around
        the text (a beginning-of-text token, in some).
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; incomplete UTF-8 shows as U+FFFD."""
        return self._backend.decode(
            [int(i) for i in ids], skip_special_tokens=skip_special_tokens
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        *,
        enable_thinking: bool | None = None,
    ) -> list[int]:
        """Ids of a chat; control tokens written in a message stay plain text.

        Args:
          messages: {"role": "system" | "user" | "assistant", "content": text} each.
          add_generation_prompt: end with the head of an assistant's turn.
          enable_thinking: False closes the thoughts of templates that have them.

        Raises:
          ValueError: the template is not ChatML, or a malformed message.
        """
        ids: list[int] = []
        start, end = self._control(chatml.TURN_START), self._control(chatml.TURN_END)
        newline = self._plain("\n")
        for role, content in chatml.turns(messages, self._format()):
            ids += [start, *self._plain(f"{role}\n{content}"), end, *newline]
        if add_generation_prompt:
            head = "assistant\n"
            if self._format().has_thinking and enable_thinking is False:
                head += "<think>\n\n</think>\n\n"
            ids += [start, *self._backend.encode(head, add_special_tokens=False).ids]
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a whole chat, marks included, as the template gives it.

        In a text the template's marks and the same words of a message look alike:
        `encode_chat` is for chats that must not be mistaken.

        Raises:
          ValueError: as `encode_chat`.
        """
        return "".join(
            f"{chatml.TURN_START}{role}\n{content}{chatml.TURN_END}\n"
            for role, content in chatml.turns(messages, self._format())
        )

    def _format(self) -> chatml.ChatFormat:
        if self.chat is None:
            raise ValueError(
                "the tokenizer's chat template is not supported: only ChatML templates "
                "are rendered (without jinja2); render it and pass the text to encode"
            )
        return self.chat

    def _plain(self, text: str) -> list[int]:
        return self._literal.encode(text, add_special_tokens=False).ids

    def _control(self, token: str) -> int:
        index = self._backend.token_to_id(token)
        if index is None:
            raise ValueError(f"the chat template uses {token!r}, which is not a token")
        return index


class StreamDecoder:
    """Turns a growing list of ids into pieces of text, never half a character.

    The pieces, with `finish()` last, add up to the text of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = 0  # first id of the window that is decoded
        self._end = 0  # ids whose text was given out

    def push(self, ids: Sequence[int]) -> str:
        """The new text of `ids`, the whole list so far.

        Raises:
          ValueError: `ids` is shorter than at the last call.
        """
        if len(ids) < len(self._ids):
            raise ValueError(
                f"`ids` must not shrink, got {len(ids)} after {len(self._ids)}"
            )
        self._ids += [int(i) for i in ids[len(self._ids) :]]
        return self._advance(is_last=False)

    def finish(self) -> str:
        """The text that was held back, complete or not."""
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> str:
        # A window that begins one piece earlier, since some tokenizers drop a space at
        # the beginning of a text.
        known = self._tokenizer.decode(self._ids[self._begin : self._end])
        text = self._tokenizer.decode(self._ids[self._begin :])
        if text.endswith(_REPLACEMENT) and not is_last:
            return ""
        if len(text) > len(known):
            self._begin = self._end
        self._end = len(self._ids)
        return text[len(known) :]


def load_tokenizer(source: str | os.PathLike) -> Tokenizer:
    """Loads the tokenizer of a target: same sources as `load_target`.

    Raises:
      ValueError: a damaged file, or a kind of tokenizer that is not supported.
      FileNotFoundError: no such source, or a folder without tokenizer.json.
    """
    path = fetch.locate(source)
    if path.is_dir():
        return _from_folder(path)
    return from_gguf(gguf.read(path))


def from_gguf(file: gguf.GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file whose header was read."""
    backend, literal = _gguf_backends(file)
    template = _text(
        file.metadata.get("tokenizer.chat_template"),
        f"{file.path}: tokenizer.chat_template",
    )
    stop_tokens = gguf_llama.stop_tokens(file)
    return Tokenizer(stop_tokens, chatml.chat_format(template), backend, literal)


def _from_folder(folder: pathlib.Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokenizer.json")
    if "model" not in tensor_files.read_json(path):
        raise ValueError(f"{path} is not a tokenizer: it lacks 'model'")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        if type(error) is not Exception:  # The package's own errors are bare ones.
            raise
        raise ValueError(f"{path} is not a valid tokenizer: {error}") from error
    settings = _optional(folder / "tokenizer_config.json")
    stop_tokens = hf_config.stop_tokens(
        _optional(folder / "config.json"),
        hf_config.read_generation_config(folder),
        where=str(folder / "config.json"),
    )
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    eos = _text(eos, f"{folder / 'tokenizer_config.json'}: eos_token")
    if not stop_tokens and eos is not None:
        index = backend.token_to_id(eos)
        if index is None:
            raise ValueError(f"{folder}: eos_token {eos!r} is not a token")
        stop_tokens = (index,)
    literal = tokenizers.Tokenizer.from_str(backend.to_str())
    literal.encode_special_tokens = True
    template = _template(folder, settings)
    return Tokenizer(stop_tokens, chatml.chat_format(template), backend, literal)


def _template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not valid UTF-8: {error}") from error
    where = f"{folder / 'tokenizer_config.json'}: chat_template"
    template = settings.get("chat_template")
    if isinstance(template, list):  # Several named ones, in older files.
        for one in template:
            if not isinstance(one, dict):
                raise ValueError(f"{where} must hold objects, got {one!r}")
        default = [one for one in template if one.get("name") == "default"]
        template = default[-1].get("template") if default else None
    return _text(template, where)


def _text(value: Any, where: str) -> str | None:
    """A text or nothing."""
    if value is None or isinstance(value, str):
        return value
    raise ValueError(f"{where} must be text, got {value!r}")


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return tensor_files.read_json(path) if path.is_file() else {}


def _gguf_backends(
    file: gguf.GgufFile,
) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """BPE as llama.cpp builds it for `pre` "smollm": single digits, then bytes.

    The second one shares the first one's tables and knows no control tokens.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    pre = file.metadata.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.model and .pre must be 'gpt2' and 'smollm', "
            f"got {model!r} and {pre!r}"
        )
    tokens, kinds = gguf_llama.tokens(file), gguf_llama.token_types(file)
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or any(type(merge) is not str for merge in merges):
        raise ValueError(
            f"{file.path}: tokenizer.ggml.merges must be a list of texts, got "
            f"{_shortened(merges)}"
        )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens must be distinct")
    for pair in pairs:
        if len(pair) != 2 or any(t not in vocab for t in (*pair, "".join(pair))):
            raise ValueError(
                f"{file.path}: merges must be pairs of tokens that make a token, got "
                f"{' '.join(pair)!r}"
            )
    model = tokenizers.models.BPE(vocab, pairs)
    steps = tokenizers.pre_tokenizers
    backend, literal = tokenizers.Tokenizer(model), tokenizers.Tokenizer(model)
    for one in (backend, literal):
        one.pre_tokenizer = steps.Sequence(
            [
                steps.Digits(individual_digits=True),
                steps.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        one.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == gguf_llama.CONTROL
        ]
    )
    return backend, literal


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
