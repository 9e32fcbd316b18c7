"""How to train: the configurations of a step and of a drafter, and the schedules."""

import dataclasses
import math
from collections.abc import Sequence

from dspark_jax import config as config_lib

ATTENTIONS = ("auto", "xla", "cudnn", "mosaic_gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What a drafter's loss is made of; static under jit. See `losses`.

    Attributes:
      ce_weight, l1_weight, confidence_weight: the paper's three weights.
      kl_weight: of KL(target | draft), weighted by slot like the others.
      joint_weight: of the joint L1, -sum_k prod_{i<=k} accept_i a block.
      decay: slot k weighs exp(-k / decay); 0 weighs all alike.
      ce_start_share, ce_start_weight: during this first share of the steps CE weighs
        `ce_start_weight` instead (L1 has no gradient while p and q do not overlap).
      cut_confidence: the confidence head's gradient stays in the head.
    """

    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    kl_weight: float = 0.0
    joint_weight: float = 0.0
    decay: float = 4.0
    ce_start_share: float = 0.0
    ce_start_weight: float = 1.0
    cut_confidence: bool = False

    def __post_init__(self):
        config_lib.check_types(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_weight") and not (0 <= value < math.inf):
                raise ValueError(
                    f"{field.name} must be at least 0 and finite, got {value}"
                )
        _check_share("ce_start_share", self.ce_start_share)
        if not self.decay >= 0:
            raise ValueError(f"decay must be at least 0 (0: none), got {self.decay}")
        weights = [
            getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name.endswith("_weight") and field.name != "ce_start_weight"
        ]
        if not any(weights):
            raise ValueError("a loss must have a term: all its weights are 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one drafter is trained, static under jit: its loss, and what may change.

    Attributes:
      trainable: "all", or "heads": the backbone stays as it is (Markov and confidence
        heads for an existing DFlash drafter).
    """

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    trainable: str = "all"

    def __post_init__(self):
        if self.trainable not in ("all", "heads"):
            raise ValueError(
                f"trainable must be one of ('all', 'heads'), got {self.trainable!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; static under jit.

    Attributes:
      num_anchors: blocks per sequence and micro-step (A).
      warmup_share: int(share * total steps) steps of linear warm-up.
      clip_norm: largest norm of one drafter's gradient.
      loss: of every drafter that has none of its own.
      on_policy_share: in this last share of the steps the blocks are those of the
        drafter's own rounds instead of uniform ones (`anchors.round_starts`).
      min_block: every block has a random length in min_block..block_size, so that the
        drafter is also at home in shorter drafts; 0: all blocks are whole.
      tap_scale: a factor per tapped layer, () for none. Their norms differ by an order
        of magnitude; `fold_tap_scale` moves the factors into fc afterwards.
      chunk_logits: how many float32 logits one drafter may have at one time.
      attention: of the drafters' blocks: "xla", "cudnn" (an NVIDIA GPU, 16-bit types),
        "mosaic_gpu" (Hopper, bfloat16), or "auto": the fastest that can run them here
        (`anchor_attention`). The target's rows are cuDNN's, unless it is "xla" or
        cuDNN can't run them.
    """

    num_anchors: int = 64
    learning_rate: float = 6e-4
    warmup_share: float = 0.04
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    on_policy_share: float = 0.0
    min_block: int = 0
    tap_scale: tuple[float, ...] = ()
    chunk_logits: int = 2**28
    attention: str = "auto"

    def __post_init__(self):
        for name in ("num_anchors", "learning_rate", "clip_norm", "chunk_logits"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        _check_share("warmup_share", self.warmup_share)
        _check_share("on_policy_share", self.on_policy_share)
        if self.min_block < 0:
            raise ValueError(f"min_block must be at least 0, got {self.min_block}")
        if self.attention not in ATTENTIONS:
            raise ValueError(
                f"attention must be one of {ATTENTIONS}, got {self.attention!r}"
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


def ce_weights(step: int, total_steps: int, recipes: Sequence[Recipe]) -> list[float]:
    """The weight of CE at this step, by drafter."""
    return [
        recipe.loss.ce_start_weight
        if step < int(recipe.loss.ce_start_share * total_steps)
        else recipe.loss.ce_weight
        for recipe in recipes
    ]


def is_on_policy(step: int, total_steps: int, config: TrainConfig) -> bool:
    """Whether this step belongs to the on-policy stage."""
    return step >= total_steps - int(config.on_policy_share * total_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """What one drafter has of its own; blocks are shaped like the target's.

    Attributes:
      loss: instead of the run's; absent: the run's.
      trainable: see `Recipe`.
      init_from: a DeepSpec folder to start from (warm start); heads that it lacks
        start afresh.
    """

    name: str
    num_layers: int = 3
    markov_kind: str = "vanilla"
    markov_rank: int = 64
    confidence_kind: str = "markov"
    loss: LossConfig | None = None
    trainable: str = "all"
    init_from: str | None = None

    def __post_init__(self):
        Recipe(trainable=self.trainable)  # its rule


def _check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
