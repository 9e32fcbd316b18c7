"""Sampling distributions (temperature, top-k, top-p, min-p) and draws from them.

A distribution is a `Row`: a cut on the scaled logits and a log-normaliser, found once
(`cuts.py`) and then evaluated pointwise wherever p or q is needed, so that the
distribution a token was drawn from and the one it is tested against are the same
number. Noise comes from `noise.py`.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dspark_jax import checks, cuts
from dspark_jax.types import Row

# Draws at it are uniform already, and T * gumbel is far from overflow.
MAX_TEMPERATURE = 1e30
# Known from other libraries, not supported yet: refused by name.
_UNSUPPORTED = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "logit_bias",
    "bad_words",
    "allowed_tokens",
    "grammar",
    "regex",
    "json_schema",
)


class Sampling(flax.struct.PyTreeNode):
    """Sampling settings: floats or arrays, [] or [B]. A field that is None is absent.

    Attributes:
      temperature: >= 0; 0 is greedy for that row. None: the whole program is greedy and
        draws no noise.
      top_k: keep the k largest logits, k >= 1, and their ties.
      top_p: keep the fewest most likely tokens whose mass reaches top_p,
        0 < top_p <= 1; equal probabilities stay together.
      min_p: keep tokens with at least min_p times the largest probability, 0..1.

    The cuts apply in this order, each on the renormalised result of the one before
    (Hugging Face's order). Temperature 1 and no cut is the model's own distribution.

    Penalties, logit bias and grammar masks are not supported yet: naming one here is an
    error.
    """

    temperature: Any = None  # float, or float32 [] or [B]
    top_k: Any = None  # int, or int32 [] or [B]
    top_p: Any = None  # float, or float32 [] or [B]
    min_p: Any = None  # float, or float32 [] or [B]

    def __new__(cls, *args, **fields):
        for name in _UNSUPPORTED:
            if name in fields:
                raise ValueError(
                    f"`sampling.{name}` is not supported yet: Sampling has "
                    "temperature, top_k, top_p and min_p"
                )
        return super().__new__(cls)


def check_sampling(sampling: Sampling, batch: int) -> Sampling:
    """Returns the settings as arrays [B]; values are checked where they are known.

    Raises:
      ValueError: a value out of range, a shape that is neither [] nor [B], or a cut
        without a temperature.
      TypeError: not a Sampling, or values that are not numbers.
    """
    if not isinstance(sampling, Sampling):
        raise TypeError(f"`sampling` must be a Sampling, got {type(sampling).__name__}")
    if sampling.temperature is None:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(sampling, name) is not None:
                raise ValueError(
                    f"`sampling.{name}` needs `sampling.temperature`: without one "
                    "decoding is greedy"
                )
        return sampling
    rules = {
        "temperature": (
            jnp.float32,
            lambda x: (x >= 0) & (x <= MAX_TEMPERATURE),
            f"in [0, {MAX_TEMPERATURE:g}]",
        ),
        "top_k": (
            jnp.int32,
            lambda x: (x >= 1) & (x <= checks.INT32_MAX),
            f"in 1..{checks.INT32_MAX}",
        ),
        "top_p": (jnp.float32, lambda x: (x > 0) & (x <= 1), "in (0, 1]"),
        "min_p": (jnp.float32, lambda x: (x >= 0) & (x <= 1), "in [0, 1]"),
    }
    fields = {}
    for name, (dtype, is_valid, rule) in rules.items():
        value = getattr(sampling, name)
        if value is None:
            continue
        known = checks.known(f"sampling.{name}", value)
        if known is not None:
            is_right, kind = checks.is_numeric(known.dtype), "numbers"
            if dtype == jnp.int32:
                is_right, kind = jnp.issubdtype(known.dtype, jnp.integer), "integers"
            if not is_right:
                raise TypeError(f"`sampling.{name}` must hold {kind}, got {value!r}")
            if not np.all(np.isfinite(known)) or not np.all(is_valid(known)):
                raise ValueError(f"`sampling.{name}` must be {rule}, got {value}")
        array = jnp.asarray(value, dtype)
        if array.shape not in ((), (batch,)):
            raise ValueError(
                f"`sampling.{name}` must have shape () or (B,) = ({batch},), got "
                f"{array.shape}"
            )
        fields[name] = jnp.broadcast_to(array, (batch,))
    return Sampling(**fields)


def make_row(
    logits: Float[Array, "... N"],
    sampling: Sampling,
    best: tuple[jax.Array, jax.Array] | None = None,
) -> Row:
    """The sampling distribution of each row of logits.

    Args:
      logits: float32 [..., N], finite or -inf. What a row with NaN or +inf gives is not
        specified: `has_distribution` finds such rows.
      sampling: fields [...], or None.
      best: index and value of each row's largest logit, where they are known.
    """
    shape = logits.shape[:-1]
    largest, top = largest_logit(logits) if best is None else best
    if sampling.temperature is None:
        return Row(
            top=jnp.zeros(shape, jnp.float32),
            cut=jnp.full(shape, -jnp.inf, jnp.float32),
            log_normaliser=jnp.zeros(shape, jnp.float32),
            point=largest,
        )
    temperature = sampling.temperature
    top = jnp.where(jnp.isfinite(top), top, 0.0)  # inf - inf is NaN
    scaled = scale(logits, top, temperature)
    cut = jnp.full(shape, -jnp.inf, jnp.float32)
    if sampling.top_k is not None:
        cut = jnp.maximum(cut, cuts.top_k(scaled, sampling.top_k))
    if sampling.top_p is not None:
        top_p_cut = cuts.top_p(scaled, cut, sampling.top_p)
        # At 1 nothing is cut: a tail too small to move the sum must stay.
        cut = jnp.where(sampling.top_p < 1, jnp.maximum(cut, top_p_cut), cut)
    if sampling.min_p is not None:
        # p >= min_p * max p, in logits; log(0) = -inf keeps everything.
        cut = jnp.maximum(cut, jnp.log(sampling.min_p))
    mass = jnp.exp(scaled)
    if has_cuts(sampling):
        # The best token stays, whatever a traced setting holds.
        cut = cuts.between(scaled, jnp.minimum(cut, 0.0))
        mass = jnp.where(scaled >= cut[..., None], mass, 0.0)
    return Row(
        top=top,
        cut=cut,
        log_normaliser=jnp.log(jnp.sum(mass, axis=-1)),
        point=jnp.where(_is_random(temperature), -1, largest).astype(jnp.int32),
    )


def largest_logit(
    logits: Float[Array, "... N"],
) -> tuple[Int[Array, "..."], Float[Array, "..."]]:
    """Index and value of the largest logit, or of a NaN; int32 [...], float32 [...].

    Every pass over the vocabulary counts, so greedy decoding makes this one only: the
    compiler joins equal calls, and `draw`'s argmax.
    """
    index = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return index, jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0]


def has_distribution(logits: Float[Array, "... N"]) -> Bool[Array, "..."]:
    """Whether a row of logits is one: no NaN, no +inf, and something above -inf."""
    # The largest says it, since argmax takes a NaN for larger than all else (a compiled
    # maximum may pass over one: XLA:CPU's does).
    return jnp.isfinite(largest_logit(logits)[1])


def has_cuts(sampling: Sampling) -> bool:
    """Whether the program cuts distributions (static: a field is there or not)."""
    fields = (sampling.top_k, sampling.top_p, sampling.min_p)
    return any(field is not None for field in fields)


def scale(
    logits: Float[Array, "... N"],
    top: Float[Array, "..."],
    temperature: Float[Array, "..."],
) -> Float[Array, "... N"]:
    """(logits - top) / T; T = 0 divides by 1 (such rows are point masses)."""
    safe = jnp.where(_is_random(temperature), temperature, 1.0)
    return (logits - top[..., None]) / safe[..., None]


def _is_random(temperature: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Whether a temperature is above 0; what a device may flush to 0 is 0."""
    return temperature >= jnp.finfo(jnp.float32).tiny


def probability(
    logits: Float[Array, "... N"],
    ids: Int[Array, "... N"],
    row: Row,
    temperature: Float[Array, "..."] | None,
) -> Float[Array, "... N"]:
    """p of the tokens `ids` with these logits, under `row`, float32; pointwise."""
    point = (ids == row.point[..., None]).astype(jnp.float32)
    if temperature is None:
        return point
    scaled = scale(logits, row.top, temperature)
    smooth = jnp.where(
        scaled >= row.cut[..., None],
        jnp.exp(scaled - row.log_normaliser[..., None]),
        0.0,
    )
    return jnp.where(row.point[..., None] >= 0, point, smooth)


def log_probability(
    logit: Float[Array, "..."], row: Row, temperature: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """log p of one drawn token a row (0 for a point mass on it), float32."""
    if temperature is None:
        return jnp.zeros_like(logit)
    scaled = scale(logit[..., None], row.top, temperature)[..., 0]
    return jnp.where(row.point >= 0, 0.0, scaled - row.log_normaliser)


def draw(
    logits: Float[Array, "... N"],
    row: Row,
    temperature: Float[Array, "..."] | None,
    gumbel: Float[Array, "... N"] | None,
) -> Int[Array, "..."]:
    """Index drawn from `row`: argmax of logits - top + T * gumbel over the kept ones.

    At T = 0 this is the argmax of the logits, with no division.
    """
    if temperature is None or gumbel is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    kept = scale(logits, row.top, temperature) >= row.cut[..., None]
    perturbed = perturb(logits, row.top, temperature, gumbel)
    perturbed = jnp.where(kept, perturbed, -jnp.inf)
    return jnp.argmax(perturbed, axis=-1).astype(jnp.int32)


def perturb(
    logits: Float[Array, "... N"],
    top: Float[Array, "..."],
    temperature: Float[Array, "..."],
    gumbel: Float[Array, "... N"],
) -> Float[Array, "... N"]:
    """logits - top + T * gumbel, whose argmax is a draw.

    Beside a large logit a small T * gumbel would be rounded away: near ties would not
    be drawn at their rate. Their distance to the largest logit is exact.
    """
    scale = jnp.where(_is_random(temperature), temperature, 0.0)
    scale = jnp.minimum(scale, MAX_TEMPERATURE)  # T * gumbel stays finite
    return (logits - top[..., None]) + scale[..., None] * gumbel
