"""Why a drafter fails to learn: what is measured, and what is concluded from it.

A drafter fails when the acceptance of its first slot is near zero, or no better than
that of a draft from the unigram distribution of the training answers. The usual causes
leave traces that can be measured: text that the target did not write, text or states
shifted against each other, a mask that leaves no blocks, taps without information, too
little data, values that are not finite.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dspark_jax import layers
from dspark_jax.training import target_states
from dspark_jax.training.target_states import Batch
from dspark_jax.types import PyTree, Target

# A drafter fails below this acceptance of its first slot…
NEAR_ZERO = 0.1
# … or below this multiple of the acceptance of unigram drafts.
UNIGRAM_FACTOR = 1.1
# What the causes are told by.
LOW_SUPERVISED_SHARE = 0.05
LOW_ANCHOR_SHARE = 0.25  # anchors kept, of those asked for
EXCESS_SURPRISE = 0.5  # nats above the target's entropy; 0 for its own text at T = 1
SHIFT_GAIN = 1.5  # a shifted text agrees so many times better …
SHIFT_MARGIN = 0.05  # … and by so much more: three sigma of 512 tokens at 15 %
TAP_RANGE = (1 / 32, 32.0)  # rms of scaled taps; 1 is aimed at
FEW_ROWS, FEW_STEPS, MANY_EPOCHS = 1000, 500, 30.0
_SHIFTS = (-1, 0, 1)
_MAX_POSITIONS, _CHUNK = 512, 128


class Findings(NamedTuple):
    """What was measured; ratios are NaN where there was nothing to measure."""

    supervised_share: float  # of all tokens
    anchors_per_row: float  # anchors that a row really gets, mean
    num_anchors: int  # asked for
    text_agreement: float  # supervised tokens that are the target's argmax
    shifted_agreement: dict[int, float]  # the same, a text shifted by so many tokens
    excess_surprise: float  # nats: -log p(token) less the entropy of p, mean
    unigram_accept_rate: float  # acceptance of drafts from the unigram distribution
    tap_layers: tuple[int, ...]
    tap_rms: tuple[float, ...]  # after `tap_scale`, without position 0
    num_target_layers: int
    num_rows: int
    steps: int
    epochs: float
    num_not_finite: dict[str, int]  # parameters that are NaN or infinite, by drafter


def measure(
    batches: tuple[Batch, ...],
    token_counts: np.ndarray,
    *,
    target: Target,
    target_params: PyTree,
    head: Float[Array, "V D"],
    tap_layers: tuple[int, ...],
    tap_scale: tuple[float, ...] = (),
    num_anchors: int,
    num_rows: int,
) -> Findings:
    """Measures on held-out batches what training does not change; `at_step` the rest.

    Args:
      batches: host arrays; the masks of all are counted, the target reads the first.
      token_counts: [V], of the training answers.
      head: `vocabulary.head_matrix`.
      tap_layers, tap_scale, num_anchors: of the run.
      num_rows: that are trained on.
    """
    masks = [np.asarray(batch.loss_mask) for batch in batches]
    candidates = np.concatenate([(m[:, :-1] & m[:, 1:]).sum(axis=1) for m in masks])
    batch = jax.tree.map(jnp.asarray, batches[0])
    run = jax.jit(
        functools.partial(target_states.compute, target, tap_layers=tap_layers)
    )
    states = run(target_params, batch)
    taps = target_states.scale_taps(states.taps[:, 1:].astype(jnp.float32), tap_scale)
    taps = taps.reshape(*taps.shape[:-1], len(tap_layers), -1)
    rms = np.sqrt(np.asarray(jnp.mean(jnp.square(taps), axis=(0, 1, 3))))
    agreement, surprise, overlap = _compare_text(
        batches[0], states.hidden, head, token_counts
    )
    return Findings(
        supervised_share=float(np.mean(np.concatenate([m.ravel() for m in masks]))),
        anchors_per_row=float(np.minimum(candidates, num_anchors).mean()),
        num_anchors=num_anchors,
        text_agreement=agreement[0],
        shifted_agreement={shift: agreement[shift] for shift in _SHIFTS if shift},
        excess_surprise=surprise,
        unigram_accept_rate=overlap,
        tap_layers=tap_layers,
        tap_rms=tuple(float(x) for x in rms),
        num_target_layers=target.config.num_layers,
        num_rows=num_rows,
        steps=0,
        epochs=0.0,
        num_not_finite={},
    )


def at_step(
    findings: Findings, params: Mapping[str, PyTree], *, step: int, batch_rows: int
) -> Findings:
    """The findings with what a training so far makes of them.

    Args:
      params: of every drafter, by name.
      step: steps done, of `batch_rows` rows each.
    """
    return findings._replace(
        steps=step,
        epochs=step * batch_rows / findings.num_rows,
        num_not_finite={name: _count_not_finite(tree) for name, tree in params.items()},
    )


def failing(held_out: Mapping[str, Any], findings: Findings) -> dict[str, str]:
    """Drafters that fail to learn, each with the rule that it breaks."""
    found = {}
    unigram = findings.unigram_accept_rate
    for name, metrics in held_out.items():
        accept = metrics["accept_rate"][0]
        if findings.num_not_finite.get(name, 0) or not math.isfinite(metrics["loss"]):
            found[name] = "its numbers are not finite"
        elif not accept >= NEAR_ZERO:
            found[name] = f"acceptance of the first slot is {accept:.3f}, near zero"
        elif accept < UNIGRAM_FACTOR * unigram:
            found[name] = (
                f"acceptance of the first slot is {accept:.3f}, no better than "
                f"{unigram:.3f} for drafts from word frequencies alone"
            )
    return found


def causes(findings: Findings) -> list[str]:
    """What may explain the failure, most telling first; empty if nothing stands out."""
    f = findings
    found = []
    for name, count in f.num_not_finite.items():
        if count:
            found.append(
                f"{count} parameters of {name} are NaN or infinite: a smaller "
                "learning_rate or clip_norm"
            )
    if f.supervised_share < LOW_SUPERVISED_SHARE:
        found.append(
            f"only {f.supervised_share:.1%} of the tokens are supervised: the loss "
            "mask misses the answers, or rows are cut before them"
        )
    if f.anchors_per_row < LOW_ANCHOR_SHARE * f.num_anchors:
        found.append(
            f"a row has {f.anchors_per_row:.1f} anchors of the {f.num_anchors} asked "
            "for: longer answers, or a smaller num_anchors"
        )
    shift, best = max(f.shifted_agreement.items(), key=lambda item: _known(item[1]))
    own = _known(f.text_agreement)
    if _known(best) > max(SHIFT_GAIN * own, own + SHIFT_MARGIN):
        found.append(
            f"the target's argmax agrees with {f.text_agreement:.1%} of the tokens, "
            f"but with {best:.1%} after a shift by {shift:+d}: text and target states "
            "are not aligned"
        )
    elif f.excess_surprise > EXCESS_SURPRISE:
        found.append(
            f"the text surprises the target by {f.excess_surprise:.2f} nats a token "
            "more than its own would (its argmax agrees with "
            f"{f.text_agreement:.1%}): it was written by another model, template or "
            "tokenizer; let the target answer the prompts"
        )
    low, high = TAP_RANGE
    for layer, rms in zip(f.tap_layers, f.tap_rms, strict=True):
        if not low < rms < high:
            found.append(
                f"tap layer {layer} has rms {rms:.3g} after scaling, 1 is aimed at: "
                "check tap_scale and the target"
            )
    if max(f.tap_layers) < f.num_target_layers // 3:
        found.append(
            f"the taps {list(f.tap_layers)} see only the first third of the target's "
            f"{f.num_target_layers} layers: spread them"
        )
    if f.num_rows < FEW_ROWS or f.epochs > MANY_EPOCHS:
        found.append(
            f"little data: {f.num_rows} rows, each seen {f.epochs:.1f} times (below "
            f"{FEW_ROWS} rows or above {MANY_EPOCHS:.0f} epochs a drafter learns by "
            "heart)"
        )
    if f.steps < FEW_STEPS:
        found.append(f"short training: {f.steps} steps (at least {FEW_STEPS})")
    return found


def describe(failures: Mapping[str, str], findings: Findings) -> list[str]:
    """The diagnosis as lines: who fails, what may cause it, what was checked."""
    f = findings
    lines = [f"{name} fails to learn: {rule}" for name, rule in failures.items()]
    reasons = causes(findings)
    lines += [f"possible cause: {reason}" for reason in reasons]
    if not reasons:
        lines.append("none of the known causes was found")
    rms = ", ".join(
        f"{layer}: {value:.2g}"
        for layer, value in zip(f.tap_layers, f.tap_rms, strict=True)
    )
    shifted = ", ".join(f"{s:+d}: {a:.1%}" for s, a in f.shifted_agreement.items())
    lines.append(
        f"checked: supervised {f.supervised_share:.1%}, anchors a row "
        f"{f.anchors_per_row:.1f} of {f.num_anchors}, text agrees with the target "
        f"{f.text_agreement:.1%} (shifted {shifted}), excess surprise "
        f"{f.excess_surprise:.2f} nats, unigram acceptance "
        f"{f.unigram_accept_rate:.3f}, tap rms {{{rms}}}, {f.num_rows} rows, "
        f"{f.epochs:.2f} epochs, {f.steps} steps, not finite "
        f"{sum(f.num_not_finite.values())}"
    )
    return lines


def _compare_text(
    batch: Batch, hidden: jax.Array, head: jax.Array, token_counts: np.ndarray
) -> tuple[dict[int, float], float, float]:
    """Agreement by shift, excess surprise, overlap with the unigram distribution."""
    mask, tokens = np.asarray(batch.loss_mask), np.asarray(batch.tokens)
    inner = mask[:, 2:-1]  # position t, whose state is at t - 1, and both neighbours
    rows, columns = np.nonzero(inner)
    if rows.size == 0:
        return dict.fromkeys(_SHIFTS, math.nan), math.nan, math.nan
    spread = np.linspace(0, rows.size - 1, min(rows.size, _MAX_POSITIONS)).astype(int)
    rows, columns = rows[spread], columns[spread] + 2
    unigram = jnp.asarray(token_counts / max(token_counts.sum(), 1), jnp.float32)
    parts = []
    for begin in range(0, rows.size, _CHUNK):
        row, column = rows[begin : begin + _CHUNK], columns[begin : begin + _CHUNK]
        states = hidden[row, column - 1]
        part = _compare_rows(states, head, jnp.asarray(tokens[row, column]), unigram)
        parts.append(jax.device_get(part))
    best, surprise, overlap = (np.concatenate(x) for x in zip(*parts, strict=True))
    agreement = {s: float(np.mean(best == tokens[rows, columns + s])) for s in _SHIFTS}
    return agreement, float(surprise.mean()), float(overlap.mean())


@jax.jit
def _compare_rows(
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    tokens: Int[Array, "N"],
    unigram: Float[Array, "V"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    logp = jax.nn.log_softmax(layers.unembed(hidden.astype(head.dtype), head), axis=-1)
    p = jnp.exp(logp)
    own = jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(p * logp, axis=-1)
    overlap = jnp.sum(jnp.minimum(p, unigram[None]), axis=-1)
    return jnp.argmax(logp, axis=-1), -own - entropy, overlap


def _count_not_finite(tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    return int(sum(int(jnp.sum(~jnp.isfinite(leaf))) for leaf in leaves))


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
