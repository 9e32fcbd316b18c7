"""The engine's declared shapes and choices: all that is static about serving."""

import dataclasses
from typing import Literal

from dspark_jax import config as config_lib
from dspark_jax.scheduling import budgets
from dspark_jax.serving.batching import Bucket

MODES = config_lib.MODES
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
MAX_PROGRAMS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Shapes and choices of an `Engine`.

    Attributes:
      num_slots: requests that run at once; others wait.
      max_length: tokens a request may have, prompt included.
      page_size: P, positions a page (a power of two; kernels like 64).
      num_pages: pages of the pool; None takes enough for every slot's `max_length`.
        With fewer, requests wait, and the youngest is preempted when they run out.
      mode: "plain" decodes without drafting; "static" verifies every draft; "compact"
        verifies the drafts that are worth their price; "cap-accept" verifies all and
        commits what "compact" would: it shows what the budget costs.
      rule, draft_length, candidates: as in `Speculation`.
      buckets: the shapes of a step, (requests, packed tokens); None declares a few.
        tokens == requests is a plain step.
      chunk, prefill_groups: a prefill step feeds up to `prefill_groups` pieces of up
        to `chunk` prompt tokens, of one request or of several. Where few are to be
        fed, a program of a quarter as many pieces does it.
      max_prefill_steps: prefill steps between two rounds, while requests decode: their
        words stall for that long at most.
      max_prefill_delay: rounds that a prefill step which would not be full may be put
        off while many requests decode and few wait to be fed (`serving.feeding`); 0
        feeds at once.
      sampling_fields: the fields of `Sampling` that requests may set. Each costs time
        in every step, whoever uses it; () is a greedy engine.
      max_stop_tokens: stop tokens a request may have.
      rounds_per_step: rounds of a step, which is one call of the device. More than one
        spares the host, and delays what it sees: admission, streaming and budgets.
      dispatch_ahead: steps that may be under way while the host plans the next: 1, or 0
        to wait for each.
      probe_every: steps without drafts after which one drafts all the same, so that
        there is a way back.
      max_deferred: tokens of a request that plain steps of "compact" may leave out of
        the drafter's context until drafting begins again (`serving.upkeep`). From
        `probe_every` * `rounds_per_step` on, only steps that draft pay for that. Their
        taps are kept: num_slots * max_deferred * tapped layers * width numbers.
      margin: what a budget must gain over full windows to be taken (a share).
      plain_margin: what drafting must gain over plain steps (`scheduling.budgets`).
      max_waiting: requests that may wait; None: any number.
    """

    num_slots: int = 16
    max_length: int = 1024
    page_size: int = 16
    num_pages: int | None = None
    mode: Literal["plain", "static", "compact", "cap-accept"] = "compact"
    rule: Literal["token", "block", "seeded"] = "token"
    draft_length: int | None = None
    candidates: int | None = None
    buckets: tuple[Bucket, ...] | None = None
    chunk: int = 64
    prefill_groups: int = 4
    max_prefill_steps: int = 8
    max_prefill_delay: int = 4
    sampling_fields: tuple[str, ...] = ("temperature",)
    max_stop_tokens: int = 4
    rounds_per_step: int = 1
    dispatch_ahead: int = 1
    probe_every: int = 64
    max_deferred: int = 64
    margin: float = budgets.MARGIN
    plain_margin: float = budgets.PLAIN_MARGIN
    max_waiting: int | None = None

    def __post_init__(self):
        config_lib.check_types(self)
        for name, value, allowed in (
            ("mode", self.mode, MODES),
            ("rule", self.rule, config_lib.RULES),
            ("dispatch_ahead", self.dispatch_ahead, (0, 1)),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        for name in (
            "num_slots",
            "max_length",
            "page_size",
            "num_pages",
            "draft_length",
            "candidates",
            "chunk",
            "prefill_groups",
            "max_prefill_steps",
            "max_stop_tokens",
            "rounds_per_step",
            "probe_every",
            "max_deferred",
            "max_waiting",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.max_prefill_delay < 0:
            raise ValueError(
                f"max_prefill_delay must be at least 0, got {self.max_prefill_delay}"
            )
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")
        for name in ("margin", "plain_margin"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must lie in [0, 1), got {getattr(self, name)}"
                )
        for field in self.sampling_fields:
            if field not in SAMPLING_FIELDS:
                raise ValueError(
                    f"sampling_fields must be among {SAMPLING_FIELDS}, got {field!r}"
                )
        if self.sampling_fields and "temperature" not in self.sampling_fields:
            raise ValueError(
                "sampling_fields must have 'temperature' if it has any, got "
                f"{self.sampling_fields}"
            )

    @property
    def is_metered(self) -> bool:
        """Whether the mode verifies, or commits, only what a budget allows."""
        return self.mode in ("compact", "cap-accept")

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Pieces that the prefill programs take: a few, or `prefill_groups`.

        A request that comes while others decode must not pay, nor make them pay, for
        rows of padding.
        """
        return tuple(sorted({max(1, self.prefill_groups // 4), self.prefill_groups}))

    @property
    def deferred_depth(self) -> int:
        """Tokens of a request that may be deferred: at least those of one step."""
        return max(self.max_deferred, self.rounds_per_step)

    @property
    def catch_up_rows(self) -> int:
        """Tokens of all requests that a catch-up shows the drafter at once.

        A few of every request, so that the weights are read seldom; not all that may be
        deferred, because padding costs as much as tokens.
        """
        depth = self.deferred_depth
        return min(self.num_slots * depth, max(4 * self.num_slots, depth))

    @property
    def pages_per_slot(self) -> int:
        """The width of a page table."""
        return -(-self.max_length // self.page_size)

    @property
    def total_pages(self) -> int:
        """Pages of the pool, the default filled in."""
        if self.num_pages is None:
            return self.num_slots * self.pages_per_slot
        return self.num_pages
