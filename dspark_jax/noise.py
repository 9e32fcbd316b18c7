"""The two kinds of noise, each a pure function of what it is keyed by.

TOKEN noise: one Gumbel per (request key, absolute position of the token drawn, token
id). Plain decoding and the "seeded" rule use it, target and drafter alike, so that the
words depend on nothing else.

ROUND noise: keyed by (request key, position of this round's anchor, slot, purpose). The
"token" and "block" rules use it. Keyed by the token's position instead, a rejected
position would be drawn again with the same number, and the output would be biased.

Values are part of the public contract: tests pin them, releases never change them. The
generator is Threefry-2x32 with 20 rounds (Salmon et al. 2011); one evaluation gives the
64 bits of one number, fine enough to draw a token of probability 1e-9 at its rate.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

DRAFT, ACCEPT, RESAMPLE = 1, 2, 3  # purposes of ROUND noise
_TOKEN = 0  # the stream of TOKEN noise
_PURPOSES = 4

Streams = tuple[jax.Array, jax.Array]  # Threefry keys, uint32 words


def token_gumbel(
    key: jax.Array, position: Int[Array, "B ..."], ids: Int[Array, "... N"]
) -> Float[Array, "B ... N"]:
    """TOKEN noise: standard Gumbel per (key, position, id), float32, finite.

    Args:
      key: typed keys [B].
      position: int32 [B, ...], absolute position of the token that is drawn.
      ids: int32 [B, ..., N], token ids.
    """
    return _gumbel(_streams(key, position, jnp.uint32(_TOKEN)), ids)


def round_streams(
    key: jax.Array, anchor_position: Int[Array, "B"], num_slots: int, purpose: int
) -> Streams:
    """ROUND noise: the streams of slots 0 .. num_slots - 1 for one purpose."""
    slots = jnp.arange(num_slots, dtype=jnp.uint32)[None]
    position = jnp.broadcast_to(anchor_position[:, None], (key.shape[0], num_slots))
    return _streams(key, position, slots * _PURPOSES + jnp.uint32(purpose))


def round_gumbel(
    streams: Streams, slot: int, ids: Int[Array, "B N"]
) -> Float[Array, "B N"]:
    """ROUND noise: standard Gumbel per (key, anchor position, slot, purpose, id)."""
    return _gumbel(tuple(word[:, slot] for word in streams), ids)  # type: ignore[arg-type]


def round_uniform(streams: Streams) -> Float[Array, "B K"]:
    """ROUND noise: uniform [0, 1) per (key, anchor position, slot)."""
    bits, _ = _threefry(*streams, jnp.uint32(0), jnp.uint32(0))
    # 24 bits: the largest float32 below 1 is representable.
    return (bits >> 8).astype(jnp.float32) * np.float32(2**-24)


def _streams(key: jax.Array, position: jax.Array, tag: jax.Array) -> Streams:
    """A Threefry key of its own for every (request key, position, tag)."""
    words = jax.random.key_data(
        key
    )  # uint32 [B, 2]: `request_keys` makes them Threefry
    words = words.reshape(words.shape[0], *([1] * (position.ndim - 1)), 2)
    return _threefry(words[..., 0], words[..., 1], position.astype(jnp.uint32), tag)


def _gumbel(streams: Streams, ids: jax.Array) -> jax.Array:
    high, low = _threefry(
        streams[0][..., None],
        streams[1][..., None],
        ids.astype(jnp.uint32),
        jnp.uint32(0),
    )
    # u in (0, 1): 64 bits near 0 (where the winners of an exponential race lie), 24
    # near 1. The clip keeps -log(-log1p(-u)) finite at both ends.
    uniform = high.astype(jnp.float32) * np.float32(2.0**-32)
    uniform = uniform + low.astype(jnp.float32) * np.float32(2.0**-64)
    uniform = jnp.clip(uniform, np.float32(2.0**-65), np.float32(1 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-uniform))


def _threefry(
    key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, 20 rounds, elementwise with broadcasting (fuses everywhere)."""
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in rotations[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1
