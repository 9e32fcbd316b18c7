"""How to train: the configurations of a step and of a drafter, and the schedules."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; static under jit.

    Attributes:
      num_anchors: blocks per sequence and micro-step (A).
      warmup_share: int(share * total steps) steps of linear warm-up.
      clip_norm: largest norm of one drafter's gradient.
      ce_weight, l1_weight, confidence_weight: the loss's three weights.
      loss_decay: slot k weighs exp(-k / loss_decay); None weighs all alike.
      ce_start_share, ce_start_weight: during this first share of the steps CE weighs
        `ce_start_weight` instead (L1 has no gradient while p and q do not overlap).
      tap_scale: a factor per tapped layer, () for none. Their norms differ by an order
        of magnitude; `fold_tap_scale` moves the factors into fc afterwards.
      chunk_slots: about how many slots have logits at one time.
      attention: of the target's pass: "xla", or "cudnn" on a GPU in bfloat16.
    """

    num_anchors: int = 64
    learning_rate: float = 6e-4
    warmup_share: float = 0.04
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    loss_decay: float | None = 4.0
    ce_start_share: float = 0.0
    ce_start_weight: float = 1.0
    tap_scale: tuple[float, ...] = ()
    chunk_slots: int = 4096
    attention: str = "xla"

    def __post_init__(self):
        for name in ("num_anchors", "learning_rate", "clip_norm", "chunk_slots"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("warmup_share", "ce_start_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must lie in [0, 1), got {getattr(self, name)}"
                )
        if self.loss_decay is not None and self.loss_decay <= 0:
            raise ValueError(
                f"loss_decay must be positive or absent, got {self.loss_decay}"
            )
        if self.attention not in ("xla", "cudnn"):
            raise ValueError(
                f"attention must be one of ('xla', 'cudnn'), got {self.attention!r}"
            )


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Linear warm-up to `learning_rate`, then a cosine to 0 (host numbers).

    Step is 0-based. With W = int(warmup_share * total): (step + 1) / W, and then
    (1 + cos(pi n / M)) / 2 for n = step - W of M = total - W. (DeepSpec's own cosine is
    this times 2 / (1 + cos(pi / M)), an accident of torch: 1e-6 at M = 1500.)
    """
    warmup = int(config.warmup_share * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(total_steps - warmup, 1)
    return config.learning_rate * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


def ce_weight(step: int, total_steps: int, config: TrainConfig) -> float:
    """The weight of CE at this step."""
    if step < int(config.ce_start_share * total_steps):
        return config.ce_start_weight
    return config.ce_weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """What one drafter has of its own; blocks are shaped like the target's."""

    name: str
    num_layers: int = 3
    markov_kind: str = "vanilla"
    markov_rank: int = 64
    confidence_kind: str = "markov"
