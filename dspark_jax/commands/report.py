"""What a generation reports: JSON fields, a summary line, a comparison."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # They import JAX.
    from dspark_jax.commands.models import Models
    from dspark_jax.commands.session import Turn


def of_turn(
    arguments: argparse.Namespace, loaded: "Models", turn: "Turn", text: str
) -> dict[str, Any]:
    """The JSON fields of one answer."""
    return {
        "text": text,
        "tokens": turn.tokens,
        "num_prompt_tokens": turn.num_prompt_tokens,
        "num_new_tokens": len(turn.tokens),
        "finish_reason": turn.finish_reason,
        "tokens_per_second": turn.tokens_per_second,
        "seconds": turn.seconds,
        "prefill_seconds": turn.prefill_seconds,
        "first_token_seconds": turn.first_token_seconds,
        "accepted_length": turn.accepted_length,
        "num_rounds": turn.num_rounds,
        "num_verified": turn.num_verified,
        "num_accepted": turn.num_accepted,
        "rule": arguments.rule,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "draft_length": loaded.draft_length,
        "target": arguments.target,
        "drafter": loaded.drafter_name,
        "device": loaded.device,
    }


def of_comparison(
    arguments: argparse.Namespace, turn: "Turn", plain: "Turn"
) -> dict[str, Any]:
    """The JSON fields that plain decoding of the same prompt adds."""
    return {
        "plain": {
            "num_new_tokens": len(plain.tokens),
            "finish_reason": plain.finish_reason,
            "tokens_per_second": plain.tokens_per_second,
            "seconds": plain.seconds,
            "prefill_seconds": plain.prefill_seconds,
        },
        "speedup": _speedup(turn, plain),
        "is_equal": turn.tokens == plain.tokens,
        "is_equality_expected": _is_equality_expected(arguments),
        "first_difference": _first_difference(turn, plain),
    }


def table(arguments: argparse.Namespace, turn: "Turn", plain: "Turn") -> str:
    """The comparison for a person."""
    lines = [f"\n{'':14}{'tokens/s':>10}{'seconds':>10}{'tokens':>9}"]
    for name, one in (("speculative", turn), ("plain", plain)):
        speed = "-" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}"
        lines.append(f"{name:14}{speed:>10}{one.seconds:>10.2f}{len(one.tokens):>9}")
    parts = []
    speedup = _speedup(turn, plain)
    if speedup is not None:
        parts.append(f"{speedup:.2f} times the speed")
    parts += _accepted(turn)
    difference = _first_difference(turn, plain)
    if difference is None:
        parts.append("the words are equal")
    elif _is_equality_expected(arguments):
        parts.append(f"the words differ after {difference} equal tokens")
    else:
        parts.append(
            f"the words differ after {difference} equal tokens, as they may: rule "
            f"{arguments.rule!r} draws other words from the same distribution (--rule "
            "seeded draws the same)"
        )
    return "\n".join([*lines, "; ".join(parts)])


def summary(turn: "Turn") -> str:
    """One line about an answer."""
    count = f"{len(turn.tokens)} tokens in {turn.seconds:.2f} s"
    if turn.tokens_per_second is not None:
        count += f", {turn.tokens_per_second:.1f} tokens/s"
    return "; ".join([count, *_accepted(turn), turn.finish_reason])


def _accepted(turn: "Turn") -> list[str]:
    if turn.accepted_length is None:
        return []
    return [f"accepted length {turn.accepted_length:.2f} in {turn.num_rounds} rounds"]


def _speedup(turn: "Turn", plain: "Turn") -> float | None:
    if not turn.tokens_per_second or not plain.tokens_per_second:
        return None
    return turn.tokens_per_second / plain.tokens_per_second


def _is_equality_expected(arguments: argparse.Namespace) -> bool:
    return arguments.temperature == 0 or arguments.rule == "seeded"


def _first_difference(turn: "Turn", plain: "Turn") -> int | None:
    """Index of the first token that differs, or None."""
    if turn.tokens == plain.tokens:
        return None
    pairs = zip(turn.tokens, plain.tokens, strict=False)
    shorter = min(len(turn.tokens), len(plain.tokens))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
