"""Noise: pinned values, the generator against JAX's, and its law."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import noise

KEYS = (0, 1, 2**31)

# Jitted: one program each instead of a hundred small ones.
token_gumbel = jax.jit(noise.token_gumbel)
round_streams = jax.jit(noise.round_streams, static_argnums=(2, 3))
round_gumbel = jax.jit(noise.round_gumbel, static_argnums=1)
round_uniform = jax.jit(noise.round_uniform)
threefry = jax.jit(noise._threefry)


def words(*values):
    return tuple(jnp.asarray([value], jnp.uint32) for value in values)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(key, counter, expected):
    """The vectors of Random123 (threefry2x32, 20 rounds)."""
    found = threefry(*words(*key), *words(*counter))
    assert [int(word[0]) for word in found] == list(expected)


def test_threefry_is_that_of_jax():
    counters = jnp.asarray(np.random.default_rng(0).integers(2**32, size=(64, 2)))
    counters = counters.astype(jnp.uint32)
    key = jnp.asarray([123, 2**32 - 5], jnp.uint32)
    expected = jax.extend.random.threefry_2x32(key, counters.T.reshape(-1))
    found = threefry(key[:1], key[1:], counters[:, 0], counters[:, 1])
    np.testing.assert_array_equal(jnp.concatenate(found), expected)


# The words are the same everywhere; logarithms differ by an ulp of their argument from
# device to device, which near G = 0 (argument 1) is an absolute 1.2e-7.
ROUNDING = {"rtol": 2e-6, "atol": 2.4e-7}

# Made once and never to be changed: a release that draws other words for a key is
# another generator.
TOKEN_VALUES = (
    (-1.25414085, 0.717519164, 2.11989641),
    (-0.0177041944, -0.855162501, -0.907207608),
    (1.01995587, 2.47763014, 0.240157962),
)
DRAFT_VALUES = (
    (2.37470722, -1.18502367, -0.739188433),
    (1.09069526, 0.032102298, 0.292060435),
    (0.728849232, -0.38533619, -1.213153),
)
ACCEPT_VALUES = (
    (0.651922226, 0.77513957, 0.147915542),
    (0.564083815, 0.358495772, 0.142731845),
    (0.663520396, 0.482209146, 0.86343807),
)


def keys():
    return jnp.stack([jax.random.key(seed, impl="threefry2x32") for seed in KEYS])


def test_token_noise_is_pinned():
    ids = jnp.tile(jnp.asarray([[0, 1, 49151]], jnp.int32), (3, 1))
    position = jnp.asarray([0, 7, 8191], jnp.int32)
    found = token_gumbel(keys(), position, ids)
    np.testing.assert_allclose(found, TOKEN_VALUES, **ROUNDING)


def test_round_noise_is_pinned():
    ids = jnp.tile(jnp.asarray([[0, 1, 49151]], jnp.int32), (3, 1))
    position = jnp.asarray([0, 7, 8191], jnp.int32)
    draft = round_streams(keys(), position, 3, noise.DRAFT)
    found = round_gumbel(draft, 2, ids)
    np.testing.assert_allclose(found, DRAFT_VALUES, **ROUNDING)
    accept = round_streams(keys(), position, 3, noise.ACCEPT)
    np.testing.assert_array_equal(
        round_uniform(accept), np.asarray(ACCEPT_VALUES, np.float32)
    )


def test_a_few_ids_get_the_numbers_of_the_whole_row():
    position = jnp.asarray([3, 4, 5], jnp.int32)
    every = jnp.broadcast_to(jnp.arange(50, dtype=jnp.int32), (3, 50))
    some = jnp.asarray([[7, 3], [0, 49], [8, 8]], jnp.int32)
    whole = token_gumbel(keys(), position, every)
    np.testing.assert_array_equal(
        token_gumbel(keys(), position, some),
        jnp.take_along_axis(whole, some, axis=1),
    )
    streams = round_streams(keys(), position, 4, noise.DRAFT)
    whole = round_gumbel(streams, 1, every)
    np.testing.assert_array_equal(
        round_gumbel(streams, 1, some), jnp.take_along_axis(whole, some, axis=1)
    )


def test_windows_get_the_numbers_of_single_positions():
    position = jnp.asarray([[3, 4, 5], [6, 7, 8], [0, 1, 2]], jnp.int32)
    ids = jnp.arange(9, dtype=jnp.int32)[None, None]
    windows = token_gumbel(keys(), position, ids)  # [B, W, V]
    for row in range(3):
        single = token_gumbel(
            keys(), position[:, row], jnp.broadcast_to(ids[0], (3, 9))
        )
        np.testing.assert_array_equal(windows[:, row], single)


def test_streams_differ():
    """Purposes, slots, anchors, keys, TOKEN noise: no stream comes twice."""
    position = jnp.arange(5, dtype=jnp.int32)
    key = jax.random.split(jax.random.key(4), 5)
    streams = [noise._streams(key, position, jnp.uint32(0))]
    for purpose in (noise.DRAFT, noise.ACCEPT, noise.RESAMPLE):
        streams.append(round_streams(key, position, 8, purpose))
        same_key = jnp.broadcast_to(key[0], (5,))
        streams.append(round_streams(same_key, position + 9, 8, purpose))
    pairs = [np.stack([np.ravel(a), np.ravel(b)], axis=1) for a, b in streams]
    pairs = np.concatenate(pairs)
    assert len(np.unique(pairs, axis=0)) == len(pairs)


def test_law_of_the_numbers():
    num = 1_000_000
    ids = jnp.arange(num, dtype=jnp.int32)[None]
    gumbel = token_gumbel(keys()[:1], jnp.zeros((1,), jnp.int32), ids)
    gumbel = np.asarray(gumbel, np.float64)[0]
    variance = np.pi**2 / 6
    assert abs(gumbel.mean() - np.euler_gamma) < 5 * np.sqrt(variance / num)
    # The kurtosis of a Gumbel is 5.4.
    assert abs(gumbel.var() - variance) < 5 * variance * np.sqrt(4.4 / num)
    # Its distribution function is uniform: 100 equal bins.
    bins = np.histogram(np.exp(-np.exp(-gumbel)), bins=100, range=(0, 1))[0]
    chi2 = ((bins - num / 100) ** 2 / (num / 100)).sum()
    assert abs(chi2 - 99) < 5 * np.sqrt(2 * 99)
    neighbours = np.corrcoef(gumbel[:-1], gumbel[1:])[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(num)

    position = jnp.arange(num // 4, dtype=jnp.int32)
    key = jnp.broadcast_to(keys()[0], position.shape)
    streams = round_streams(key, position, 4, noise.ACCEPT)
    uniform = np.asarray(round_uniform(streams), np.float64)
    assert uniform.min() >= 0
    assert uniform.max() < 1
    bins = np.histogram(uniform, bins=100, range=(0, 1))[0]
    chi2 = ((bins - num / 100) ** 2 / (num / 100)).sum()
    assert abs(chi2 - 99) < 5 * np.sqrt(2 * 99)


def test_numbers_are_finite_at_the_extremes(monkeypatch):
    ones = 0xFFFFFFFF
    high = jnp.asarray([0, 0, 0, 1, ones, ones, ones - 255], jnp.uint32)
    low = jnp.asarray([0, 1, ones, 0, 0, ones, 0], jnp.uint32)
    monkeypatch.setattr(noise, "_threefry", lambda *_: (high[None], low[None]))
    ids = jnp.zeros((1, 7), jnp.int32)
    found = np.asarray(noise._gumbel(words(0, 0), ids))[0]
    assert np.isfinite(found).all()
    assert found.max() < 46  # -log(2^-65)
    assert found.min() > -3  # -log(24 log 2)
    assert (np.diff(found) <= 0).all()
    # The finest number below 1 that round_uniform gives is still below 1.
    monkeypatch.setattr(noise, "_threefry", lambda *_: (jnp.uint32([[ones]]), None))
    assert float(noise.round_uniform(words(0, 0))[0, 0]) < 1


def test_small_uniforms_keep_their_law(monkeypatch):
    """Given u < 2^-20, u is uniform there: masses below 1e-7 are drawn at rate."""
    whole = noise._threefry

    def conditioned(key0, key1, x0, x1):
        high, low = whole(key0, key1, x0, x1)
        return high >> 20, low

    streams = words(3, 4)
    monkeypatch.setattr(noise, "_threefry", conditioned)
    num = 400_000
    ids = jnp.arange(num, dtype=jnp.int32)[None]
    gumbel = np.asarray(jax.jit(noise._gumbel)(streams, ids), np.float64)[0]
    uniform = -np.expm1(-np.exp(-gumbel)) * 2.0**20
    bins = np.histogram(uniform, bins=1000, range=(0, 1))[0]
    chi2 = ((bins - num / 1000) ** 2 / (num / 1000)).sum()
    assert abs(chi2 - 999) < 5 * np.sqrt(2 * 999)
