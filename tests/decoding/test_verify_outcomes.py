"""Exactness of `verify` itself: every draft, window, cap and outcome, forced in turn.

The noise that `verify` draws is replaced by numbers just on either side of where a
float64 reference decides, so that a row of the batch is one outcome and its weight the
outcome's probability. The words that `verify` gives must be those of the outcome, and
with the weights they must have the target's law. Target rows beyond the window are
wrong on purpose, or, packed, those of the next request.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import noise, sampling
from dspark_jax.decoding import verify
from dspark_jax.paged_cache import RowLayout
from dspark_jax.sampling import Sampling
from dspark_jax.types import Draft

V, K = 3, 3
MARGIN = 0.001  # of the forced noise, relative
WORLDS = ((1.0, 0.0), (0.7, 0.15), (2.5, 0.15))  # temperature, share of zeros
PATHS = np.array(list(np.ndindex(*[V] * K)))  # [X, K]
PATTERNS = np.array(list(np.ndindex(*[2] * K)), bool)
WORDS = np.array(list(np.ndindex(*[V] * (K + 1))))


def make_world(seed, zeros):
    """Random p and q of every prefix, a share of them zero: [V^k, V] a level."""
    rng = np.random.default_rng(seed)

    def table(level):
        mass = rng.dirichlet(np.ones(V), size=V**level)
        mass = np.where(rng.random(mass.shape) < zeros, 0.0, mass)
        mass[mass.sum(-1) == 0] = 1.0
        return mass / mass.sum(-1, keepdims=True)

    return [table(k) for k in range(K + 1)], [table(k) for k in range(K)]


def along(tables, paths):
    """Tables of levels 0, 1, ... read at the prefixes of every path: [R, levels, V]."""
    index = [paths[:, :k] @ V ** np.arange(k - 1, -1, -1) for k in range(len(tables))]
    return np.stack([t[i] for t, i in zip(tables, index, strict=True)], axis=1)


def take(array, index):
    return np.take_along_axis(array, index[..., None], axis=-1)[..., 0]


def rows_at(array, index):
    return array[np.arange(len(array)), index]


def thresholds(rule, p, q, drafts, window):
    """Probabilities [R, K] that slots pass, and weights w_0 .. w_K [R, K + 1]."""
    p_drafted, q_drafted = take(p[:, :K], drafts), take(q, drafts)
    ratio = p_drafted / np.where(q_drafted > 0, q_drafted, 1.0)
    weight = np.ones((len(p), K + 1))
    if rule == "token":
        return np.minimum(ratio, 1), weight
    for k in range(K):
        weight[:, k + 1] = np.minimum(1, weight[:, k] * ratio[:, k])
    passes = weight[:, 1:].copy()
    for k in range(1, K):
        w = weight[:, k]
        mass = np.maximum(w[:, None] * p[:, k] - q[:, k], 0).sum(-1)
        total = mass + 1 - w
        inside = np.where(total > 0, mass / np.where(total > 0, total, 1), 0)
        passes[:, k - 1] = np.where(k < window, inside, w)
    return passes, weight


def outcomes(rule, world, caps):
    """Rows of outcomes: inputs, forced noise, weight and the words expected."""
    p_tables, q_tables = world
    grid = (len(PATHS), K + 1, len(caps), len(PATTERNS), V)
    path, window, cap, pattern, next_token = np.indices(grid).reshape(len(grid), -1)
    drafts, cap, is_passed = PATHS[path], np.array(caps)[cap], PATTERNS[pattern]
    p, q = along(p_tables, drafts), along(q_tables, drafts)
    passes, weights = thresholds(rule, p, q, drafts, window)
    slots = np.arange(1, K + 1)
    is_inside = slots <= window[:, None]
    passes = np.where(is_inside, passes, 0.5)  # never looked at
    stands = is_passed & is_inside
    if rule == "token":
        accepted = np.cumprod(stands, axis=1).sum(1)
    else:
        accepted = np.where(stands, slots, 0).max(1)
    accepted = np.minimum(accepted, cap)
    mass = rows_at(p, accepted)
    w, slot = rows_at(weights, accepted), np.minimum(accepted, K - 1)
    residual = np.maximum(w[:, None] * mass - rows_at(q, slot), 0)
    is_whole = accepted >= np.minimum(window, cap)
    mass = np.where(is_whole[:, None], mass, residual)
    total = mass.sum(-1, keepdims=True)
    mass = mass / np.where(total > 0, total, 1)
    uniform = np.where(is_passed, passes * (1 - MARGIN), passes + MARGIN * (1 - passes))
    return {
        "drafts": drafts,
        "window": window,
        "cap": cap,
        "p": p,
        "q": q,
        "accepted": accepted,
        "next_token": next_token,
        "uniform": np.where(is_inside, uniform, np.where(is_passed, 0.0, 0.99)),
        "gumbel": forcing(mass, next_token),
        "weight": take(q, drafts).prod(1)
        * np.where(is_passed, passes, 1 - passes).prod(1)
        * take(mass, next_token),
    }


def seeded_outcomes(world, caps):
    """The same for TOKEN noise: the target's own words are forced, drafts any."""
    p_tables, q_tables = world
    grid = (len(PATHS), K + 1, len(caps), len(WORDS))
    path, window, cap, words = np.indices(grid).reshape(len(grid), -1)
    drafts, cap, words = PATHS[path], np.array(caps)[cap], WORDS[words]
    p, q = along(p_tables, drafts), along(q_tables, drafts)
    is_equal = (words[:, :K] == drafts) & (np.arange(K) < window[:, None])
    accepted = np.minimum(np.cumprod(is_equal, axis=1).sum(1), cap)
    return {
        "drafts": drafts,
        "window": window,
        "cap": cap,
        "p": p,
        "q": q,
        "accepted": accepted,
        "next_token": rows_at(words, accepted),
        "gumbel": forcing(p, words),
        "weight": take(p, words).prod(1) / len(PATHS),  # the drafter's law is any
    }


def forcing(mass, tokens):
    """Gumbels that draw `tokens` by a margin, if masses are those; 0 where they are."""
    gumbel = np.where(mass > 0, -np.log(np.where(mass > 0, mass, 1)), 9.0)
    return gumbel + MARGIN * (np.arange(V) == tokens[..., None])


def lay_out(window):
    """The rows that each window needs, one request's after the other's."""
    counts = window + 1
    starts = np.cumsum(counts) - counts
    request = np.repeat(np.arange(len(counts)), counts)
    offset = np.arange(counts.sum()) - starts[request]
    index = np.arange(K + 1)
    rows = np.where(index < counts[:, None], starts[:, None] + index, len(request))
    return RowLayout(*(jnp.asarray(x, jnp.int32) for x in (request, offset, rows)))


@functools.partial(jax.jit, static_argnames="rule")
def run(case, p_logits, settings, layout, *, rule):
    """`verify` with the noise of the case."""
    num = len(case["window"])
    numbers = jnp.arange(num, dtype=jnp.uint32)
    keys = jax.random.wrap_key_data(jnp.stack([0 * numbers, numbers], axis=1))
    anchor_position = (numbers % 5).astype(jnp.int32)

    def token_gumbel(key, position, ids):
        request = jax.random.key_data(key)[:, 1]
        request = request.reshape(-1, *[1] * (position.ndim - 1))
        return case["gumbel"][request, position - anchor_position[request] - 1]

    q_logits = settings.temperature[:, None, None] * jnp.log(case["q"])
    of_rows = jax.tree.map(lambda x: x[:, None], settings)
    drafts = case["drafts"]
    draft = Draft(
        tokens=drafts,
        probability=jnp.take_along_axis(case["q"], drafts[..., None], -1)[..., 0],
        logits=q_logits,
        ids=None,
        row=sampling.make_row(q_logits, of_rows),
        confidence_logits=None,
    )
    if layout is not None:
        of_rows = jax.tree.map(lambda x: x[layout.request], settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "round_uniform", lambda streams: case["uniform"])
        patch.setattr(noise, "round_gumbel", lambda streams, slot, ids: case["gumbel"])
        patch.setattr(noise, "token_gumbel", token_gumbel)
        return verify.verify(
            keys,
            anchor_position,
            draft,
            p_logits,
            sampling.make_row(p_logits, of_rows),
            case["window"],
            settings,
            rule=rule,
            commit_length=case.get("cap"),
            layout=layout,
        )


def law(case, found, p_tables):
    """The law of K + 1 words for every window and cap, [K + 1, K + 1, V^(K + 1)]."""
    total = np.zeros((K + 1, K + 1, V ** (K + 1)))
    for accepted in range(K + 1):
        own = found["accepted"] == accepted
        words = np.column_stack(
            [case["drafts"][own, :accepted], found["next_token"][own]]
        )
        index = words @ V ** np.arange(accepted, -1, -1)
        ends = np.zeros((K + 1, K + 1, V ** (accepted + 1)))
        at = case["window"][own], case["cap"][own], index
        np.add.at(ends, at, case["weight"][own])
        for level in range(accepted + 1, K + 1):
            ends = (ends[..., None] * p_tables[level]).reshape(K + 1, K + 1, -1)
        total += ends
    return total


@pytest.mark.parametrize("is_capped", [False, True], ids=["free", "capped"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("rule", ["token", "block", "seeded"])
def test_every_outcome_has_its_words(rule, is_packed, is_capped):
    caps = list(range(K + 1)) if is_capped else [K]
    for seed, (temperature, zeros) in enumerate(WORLDS):
        world = make_world(seed, zeros)
        if rule == "seeded":
            case = seeded_outcomes(world, caps)
        else:
            case = outcomes(rule, world, caps)
        num = len(case["window"])
        settings = Sampling(temperature=jnp.full((num,), temperature, jnp.float32))
        is_needed = np.arange(K + 1) <= case["window"][:, None]
        p = np.where(is_needed[..., None], case["p"], np.roll(case["p"], 1, axis=-1))
        layout = None
        if is_packed:
            p, layout = case["p"][is_needed], lay_out(case["window"])
        with np.errstate(divide="ignore"):
            p_logits = jnp.asarray(temperature * np.log(p), jnp.float32)
        names = {"drafts", "window", "q", "uniform", "gumbel"} & set(case)
        arrays = {
            name: jnp.asarray(
                case[name],
                jnp.float32 if case[name].dtype == np.float64 else jnp.int32,
            )
            for name in names | ({"cap"} if is_capped else set())
        }
        verdict = run(arrays, p_logits, settings, layout, rule=rule)
        assert bool(verdict.is_finite.all())
        found = {
            "accepted": np.asarray(verdict.num_accepted),
            "next_token": np.asarray(verdict.next_token),
        }
        happens = case["weight"] > 1e-12
        for name, values in found.items():
            expected = case[name][happens]
            np.testing.assert_array_equal(values[happens], expected, err_msg=name)
        assert set(found["accepted"][happens]) == set(range(K + 1))
        true = np.ones(1)
        for table in world[0]:
            true = (true[:, None] * table).reshape(-1)
        for window_law in law(case, found, world[0])[:, caps].reshape(-1, len(true)):
            np.testing.assert_allclose(window_law, true, atol=1e-12)
