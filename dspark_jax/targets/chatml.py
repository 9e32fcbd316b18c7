"""ChatML chats: what a template adds to the turns, and the turns that it shows.

Templates are not run (no jinja2): a ChatML template is known by what it holds, and any
other is refused.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
# A template that holds one of these does more than ChatML's turns.
_NOT_CHATML = ("strftime", "| trim", "|trim", "[INST]", "<|start_header_id|>", "<|eot")
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)([^'\"{}]+?)<\|im_end\|>")


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """What a ChatML template adds to the turns themselves.

    Attributes:
      default_system: text of the system turn when the first message is not one.
      has_thinking: the template knows `enable_thinking` (Qwen3).
      drops_thoughts: of an assistant's message only what follows "</think>" is shown,
        but for the last message, which shows its thoughts or empty ones (Qwen3).
    """

    default_system: str | None = None
    has_thinking: bool = False
    drops_thoughts: bool = False


def chat_format(template: str | None) -> ChatFormat | None:
    """What a ChatML template adds, found by its content; None for any other."""
    if not template or TURN_START not in template or TURN_END not in template:
        return None
    if any(mark in template for mark in _NOT_CHATML):
        return None
    found = _DEFAULT_SYSTEM.search(template)
    default = found.group(1).replace("\\n", "\n") if found else None
    return ChatFormat(
        default,
        has_thinking="enable_thinking" in template,
        drops_thoughts="</think>')[-1]" in template,
    )


def turns(
    messages: Sequence[Mapping[str, str]], chat: ChatFormat
) -> list[tuple[str, str]]:
    """(role, content) of every turn that the template shows.

    Raises:
      ValueError: a malformed message.
    """
    for message in messages:
        _check_message(message)
    shown = [(m["role"], m["content"]) for m in messages]
    if chat.default_system is not None and (not shown or shown[0][0] != "system"):
        shown.insert(0, ("system", chat.default_system))
    if not chat.drops_thoughts:
        return shown
    last = len(shown) - 1
    return [
        (
            role,
            _thoughts(content, is_last=i == last) if role == "assistant" else content,
        )
        for i, (role, content) in enumerate(shown)
    ]


def _check_message(message: Mapping[str, str]) -> None:
    if not {"role", "content"} <= set(message):
        raise ValueError(
            f"messages must have the keys 'role' and 'content', got {message!r}"
        )
    if message["role"] not in ROLES:
        raise ValueError(f"role must be one of {ROLES}, got {message['role']!r}")
    if not isinstance(message["content"], str):
        raise ValueError(f"content must be text, got {message['content']!r}")


def _thoughts(content: str, *, is_last: bool) -> str:
    thoughts, mark, answer = content.rpartition("</think>")
    answer = answer.lstrip("\n") if mark else content
    if not is_last:
        return answer
    thoughts = thoughts.split("<think>")[-1].strip("\n")
    return f"<think>\n{thoughts}\n</think>\n\n" + answer.lstrip("\n")
