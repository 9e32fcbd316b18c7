"""The DSpark drafter: one parallel pass, then K sequential draws with the Markov head.

draft_logits_k = base_logits_k + W2 f_k(x_{k-1}), x_k ~ softmax(draft_logits_k / T): the
backbone is parallel, its repair is sequential and costs one small product a slot. With
`markov_kind` "none" this is DFlash.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax import candidates, checks, kv_cache, layers
from dspark_jax.config import DecoderConfig, DrafterConfig
from dspark_jax.draft_sampler import DraftSampler
from dspark_jax.drafters import backbone, confidence, markov
from dspark_jax.types import Bound, Draft, Drafter, PyTree, Target


class DraftVocabulary(flax.struct.PyTreeNode):
    """The ids that the drafter may propose; q is zero on all others (still exact)."""

    ids: jax.Array  # int32 [N]
    head: jax.Array  # [N, D]
    w2: jax.Array | None  # [N, R]


class DSparkParams(flax.struct.PyTreeNode):
    """All parameters of a drafter.

    `embed` and `head` are None when the drafter uses its target's, as trained ones do.
    """

    backbone: backbone.BackboneParams
    markov: markov.MarkovParams | None
    confidence: confidence.ConfidenceParams | None
    embed: jax.Array | None = None  # [V, D]
    head: jax.Array | None = None  # [V, D]
    draft_vocabulary: DraftVocabulary | None = None


def make_drafter(config: DrafterConfig, target: Target) -> Drafter:
    """The Drafter of this configuration for `target`.

    Raises:
      ValueError: the drafter was made for another target.
    """
    checks.check_drafter_fits(config, target.config)
    arguments = (config, target)
    return Drafter(
        config=config,
        init_state=Bound(_init_state, (config, _implementation(target))),
        observe=Bound(_observe, (config,)),
        propose=Bound(_propose, arguments),
    )


def abstract(config: DrafterConfig) -> DSparkParams:
    """Shapes and dtypes of the trainable parameters."""
    return DSparkParams(
        backbone=backbone.abstract(config),
        markov=markov.abstract(config),
        confidence=confidence.abstract(config),
    )


def init(key: jax.Array, config: DrafterConfig) -> DSparkParams:
    """Random parameters: N(0, 0.02²), norms 1, biases 0 (DeepSpec's initialisation)."""
    return layers.init_from_abstract(key, abstract(config))


def with_draft_vocabulary(
    params: DSparkParams,
    target: Target,
    target_params: PyTree,
    ids: Int[Array, "N"] | np.ndarray,
    *,
    head: Float[Array, "V D"] | None = None,
) -> DSparkParams:
    """Restricts drafting to `ids`: a smaller head and W2, exact all the same.

    Args:
      ids: int32 [N], distinct token ids, the most frequent ones of the use at hand.
      head: the target's head where it is at hand as a table; else it is computed.

    Raises:
      ValueError: ids repeated or outside the vocabulary.
    """
    given = np.asarray(ids)
    known = np.unique(given)
    vocab_size = target.config.vocab_size
    if known.size == 0:
        raise ValueError("`ids` must hold at least one token id, got none")
    if known.size != given.size or known[0] < 0 or known[-1] >= vocab_size:
        raise ValueError(
            f"`ids` must be distinct and lie in 0..{vocab_size - 1}, got "
            f"{given.size} ids, {known.size} distinct, from {known[0]} to {known[-1]}"
        )
    head = head if params.head is None else params.head
    if head is None:
        # The target's head is only known as a linear function: apply it to the basis.
        basis = jnp.eye(target.config.width, dtype=jnp.float32)
        head = target.unembed(target_params, basis).T

    def rows(table: jax.Array) -> jax.Array:
        # On the host: on the device every shape would compile a program of its own.
        return jax.device_put(np.asarray(table)[known])

    return params.replace(
        draft_vocabulary=DraftVocabulary(
            ids=jax.device_put(known.astype(np.int32)),
            head=rows(head),
            w2=None if params.markov is None else rows(params.markov.w2),
        )
    )


def block_logits(
    config: DrafterConfig,
    target: Target,
    params: DSparkParams,
    target_params: PyTree,
    state: kv_cache.DenseCache,
    anchor: Int[Array, "B"],
    position: Int[Array, "B"],
    length: int,
) -> tuple[
    Float[Array, "B K D"],
    Float[Array, "B K N"],
    Int[Array, "N"] | None,
    kv_cache.DenseCache,
]:
    """The parallel part: hidden states and base logits of a block of `length` slots.

    Returns:
      Hidden states, base logits, the token of each logit (None: its index), and the
      state, in which the block's own keys may lie.
    """
    dtype = layers.dtype_of(config.compute_dtype)
    inputs = backbone.block_inputs(config, anchor, length)  # [B, K]
    if params.embed is None:
        embedded = target.embed(target_params, inputs).astype(dtype)
    else:
        embedded = layers.embed(params.embed, inputs, dtype)
    positions = position[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    hidden, state = backbone.cached_block_hidden(
        params.backbone, config, embedded, positions, state
    )
    base_logits, ids = _base_logits(params, target, target_params, hidden)
    return hidden, base_logits, ids, state


def draw(
    config: DrafterConfig,
    params: DSparkParams,
    sampler: DraftSampler,
    anchor: Int[Array, "B"],
    hidden: Float[Array, "B K D"],
    base_logits: Float[Array, "B K N"],
    ids: Int[Array, "N"] | None,
) -> Draft:
    """The sequential part: the Markov head's draws, among candidates if asked."""
    rows = None  # [B, K, N], rows of W2 when drafting among candidates
    if sampler.candidates is not None:
        num = min(sampler.candidates, base_logits.shape[-1])
        base_logits, rows = candidates.best(base_logits, num)
        ids = rows if ids is None else ids[rows]
    return _draw_block(config, params, sampler, anchor, hidden, base_logits, ids, rows)


def _implementation(target: Target) -> str:
    """The target's choice of attention; targets of users have none."""
    is_ours = isinstance(target.config, DecoderConfig)
    return target.config.attention if is_ours else "auto"


def _init_state(
    config: DrafterConfig, implementation: str, batch: int, capacity: int
) -> kv_cache.DenseCache:
    return kv_cache.DenseCache.create(
        config.num_layers,
        batch,
        capacity,
        config.block.num_kv_heads,
        config.block.head_width,
        layers.dtype_of(config.compute_dtype),
        implementation,
        spare=config.block_size,
    )


def _observe(
    config: DrafterConfig,
    params: DSparkParams,
    state: kv_cache.DenseCache,
    tokens: Int[Array, "B W"],
    positions: Int[Array, "B W"],
    taps: Float[Array, "B W MD"],
) -> kv_cache.DenseCache:
    del tokens  # The taps know them.
    features = backbone.context_features(params.backbone, config, taps)
    rows = backbone.context_keys_values(params.backbone, config, features, positions)
    for layer, (key, value) in enumerate(rows):
        state = state.write(layer, key, value, positions)
    return state


def _propose(
    config: DrafterConfig,
    target: Target,
    params: DSparkParams,
    target_params: PyTree,
    state: kv_cache.DenseCache,
    anchor: Int[Array, "B"],
    position: Int[Array, "B"],
    sampler: DraftSampler,
) -> tuple[Draft, kv_cache.DenseCache]:
    hidden, base_logits, ids, state = block_logits(
        config,
        target,
        params,
        target_params,
        state,
        anchor,
        position,
        sampler.draft_length,
    )
    return draw(config, params, sampler, anchor, hidden, base_logits, ids), state


def _base_logits(
    params: DSparkParams, target: Target, target_params: PyTree, hidden: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    if params.draft_vocabulary is not None:
        vocabulary = params.draft_vocabulary
        return layers.unembed(hidden, vocabulary.head), vocabulary.ids
    if params.head is not None:
        return layers.unembed(hidden, params.head), None
    return target.unembed(target_params, hidden), None


def _draw_block(
    config: DrafterConfig,
    params: DSparkParams,
    sampler: DraftSampler,
    anchor: jax.Array,
    hidden: jax.Array,
    base_logits: jax.Array,
    ids: jax.Array | None,
    rows: jax.Array | None,
) -> Draft:
    """The sequential part: K draws, unrolled: an inner loop would split GPU graphs."""
    batch, length = hidden.shape[:2]
    w2: Any = None
    if params.markov is not None:
        w2 = params.markov.w2
        if params.draft_vocabulary is not None:
            w2 = params.draft_vocabulary.w2
    token = anchor
    state = markov.initial_state(config, (batch,))
    slots: list[tuple] = []
    for slot in range(length):
        logits = base_logits[:, slot]
        if params.markov is not None:
            feature, state = markov.feature(
                params.markov,
                config,
                hidden[:, slot],
                markov.embedding(params.markov, config, token),
                state,
            )
            if rows is None:
                logits = logits + markov.transition_bias(w2, feature)
            else:
                logits = logits + markov.candidate_bias(w2, feature, rows[:, slot])
        slot_ids = ids[:, slot] if ids is not None and ids.ndim == 3 else ids
        choice = sampler.choose(slot, logits, slot_ids)
        token = choice.token
        slots.append((choice, logits))
    # [B] or [B, N] a slot -> [B, K] or [B, K, N]; a Row that is None stays None.
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *slots)
    choices, logits = stacked
    tokens = choices.token
    # What no later draw needs is left to here, where it is done for all slots at once.
    probability, row = sampler.describe(logits, choices)
    confidence_logits = None
    if params.confidence is not None:
        embedding = None
        if params.markov is not None:
            previous = jnp.concatenate([anchor[:, None], tokens[:, :-1]], axis=1)
            embedding = markov.embedding(params.markov, config, previous)
        confidence_logits = confidence.logits(
            params.confidence, config, hidden, embedding
        )
    return Draft(
        tokens=tokens,
        probability=probability,
        logits=logits,
        ids=ids,
        row=row,
        confidence_logits=confidence_logits,
    )
