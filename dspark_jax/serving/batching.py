"""Declared shapes, and which of them a batch runs in.

A step is compiled for a `Bucket`: R requests and T packed rows. A batch runs in the
smallest R that holds it; rows and requests beyond the real ones are padding, which
writes nothing. So a steady state never compiles.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """One compiled shape of a step: R requests, T packed rows, anchors included.

    T == R is a plain step: nothing is drafted, every request feeds its anchor.
    """

    requests: int
    tokens: int

    def __post_init__(self):
        for name in ("requests", "tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Bucket.{name} must be an int, got {value!r}")
        if not 1 <= self.requests <= self.tokens:
            raise ValueError(
                "Bucket.tokens must be at least Bucket.requests >= 1, got "
                f"{self.tokens} and {self.requests}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether a step of this shape drafts nothing."""
        return self.tokens == self.requests


def default_buckets(mode: str, num_slots: int, draft_length: int) -> tuple[Bucket, ...]:
    """At most 9 shapes: a sixteenth, a quarter and all of the slots, by T."""
    requests = {-(-num_slots // 16), -(-num_slots // 4), num_slots}
    return buckets_of(mode, sorted(requests), draft_length)


def buckets_of(
    mode: str, requests: Sequence[int], draft_length: int
) -> tuple[Bucket, ...]:
    """The shapes of a mode for these numbers of requests, ascending.

    "compact" has plain steps, half and full windows.
    """
    shapes = set()
    for r in requests:
        if mode in ("plain", "compact"):
            shapes.add(Bucket(r, r))
        if mode != "plain":
            shapes.add(Bucket(r, r * (1 + draft_length)))
        if mode == "compact":
            shapes.add(Bucket(r, r * (1 + draft_length // 2)))
    return tuple(sorted(shapes))


def check_buckets(
    buckets: Sequence[Bucket], mode: str, num_slots: int, draft_length: int
) -> None:
    """Raises ValueError unless every batch finds a shape that its mode needs."""
    if not buckets:
        raise ValueError("buckets must name at least one shape, got ()")
    largest = max(bucket.requests for bucket in buckets)
    if largest < num_slots:
        raise ValueError(
            f"buckets must have one of at least num_slots = {num_slots} requests, the "
            f"largest has {largest}"
        )
    width = 1 + draft_length
    for bucket in buckets:
        if bucket.tokens > bucket.requests * width:
            raise ValueError(
                "buckets must not have more tokens than their requests can feed, "
                f"{bucket.requests} * {width}, got {bucket}"
            )
    for requests in {bucket.requests for bucket in buckets}:
        shapes = {b.tokens for b in buckets if b.requests == requests}
        full = requests if mode == "plain" else requests * width
        if full not in shapes:
            raise ValueError(
                f"buckets must have the shape {Bucket(requests, full)}, which mode "
                f"{mode!r} needs when nothing is cut"
            )
        if mode != "compact" and shapes != {full}:
            raise ValueError(
                f"mode {mode!r} runs {Bucket(requests, full)} only, but buckets have "
                f"{sorted(shapes)} tokens at {requests} requests"
            )


class BucketGrid:
    """The declared buckets by requests."""

    def __init__(self, buckets: Sequence[Bucket]):
        self.buckets = tuple(sorted(set(buckets)))
        self._requests = sorted({bucket.requests for bucket in self.buckets})

    def requests_for(self, count: int) -> int:
        """The smallest R that holds `count` requests."""
        return next(r for r in self._requests if r >= count)

    @property
    def requests(self) -> tuple[int, ...]:
        """The declared numbers of requests, ascending."""
        return tuple(self._requests)

    def drafting(self, requests: int) -> list[int]:
        """T of the speculative shapes with R requests, ascending."""
        return [b.tokens for b in self.buckets if b.requests == requests < b.tokens]

    @property
    def has_any_plain(self) -> bool:
        """Whether there is a step that drafts nothing."""
        return any(bucket.is_plain for bucket in self.buckets)

    def has_plain(self, requests: int) -> bool:
        """Whether a plain step of R requests is declared."""
        return Bucket(requests, requests) in self.buckets
