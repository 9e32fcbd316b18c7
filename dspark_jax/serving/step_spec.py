"""What is static about the step programs, and what they read and never write."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax

from dspark_jax.config import Speculation
from dspark_jax.serving.control import Columns
from dspark_jax.types import Drafter, Target


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What is static about an engine's programs; equal ones share compiled code."""

    target: Target
    drafter: Drafter | None
    options: Speculation
    draft_length: int
    sampling_fields: tuple[str, ...]
    max_stop_tokens: int
    num_rounds: int
    caps_commit: bool
    is_budgeted: bool
    chunk: int
    pages_per_slot: int

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Found once: every call of a program asks for it."""
        fields = dataclasses.fields(self)
        return hash(tuple(getattr(self, field.name) for field in fields))

    @functools.cached_property
    def round_control(self) -> Columns:
        """Of a round: who takes part, the drafts to verify in all, and the pages."""
        return Columns((("slot", 1), ("num_drafts", 1), ("table", self.pages_per_slot)))

    @functools.cached_property
    def catch_up_control(self) -> Columns:
        """Of a catch-up: how many of a slot's last tokens await it, and the pages."""
        return Columns((("slot", 1), ("count", 1), ("table", self.pages_per_slot)))

    @functools.cached_property
    def round_result(self) -> Columns:
        """Of a speculative round, a row a request."""
        length = self.draft_length
        return Columns(
            (
                ("num_committed", 1),
                ("finish", 1),
                ("verify_length", 1),
                ("commit_length", 1),
                ("num_accepted", 1),
                ("tokens", length + 1),
                ("confidence", length),
            )
        )

    @functools.cached_property
    def plain_result(self) -> Columns:
        """Of a plain round, or of the tokens drawn after a prompt."""
        return Columns((("num_committed", 1), ("finish", 1), ("tokens", 1)))

    @functools.cached_property
    def prefill_control(self) -> Columns:
        """A piece of a prompt, and the whole admission of its request."""
        return Columns(
            (
                ("slot", 1),
                ("draws", 1),  # 1: ends the prompt, and the next token is drawn
                ("first", 1),  # position of the piece's first token
                ("count", 1),
                ("length", 1),  # known tokens
                ("limit", 1),
                ("anchor", 1),  # the last known token
                ("key", 2),
                *((field, 1) for field in self.sampling_fields),
                ("stop_tokens", self.max_stop_tokens),
                ("table", self.pages_per_slot),
                ("tokens", self.chunk),
            )
        )


class Params(flax.struct.PyTreeNode):
    """What the programs read and never write."""

    target: Any
    drafter: Any
    temperatures: jax.Array | None  # float32 [K], of the confidences
