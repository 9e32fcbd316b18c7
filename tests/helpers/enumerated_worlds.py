"""Random worlds small enough to enumerate: tables of logits, and every path of drafts.

A world has a target's and a drafter's logits after every prefix of up to K tokens, its
settings, and a verify length and a cap on the commit along every path of K drafts. The
truth is a float64 numpy reference that sorts.
"""

import itertools

import jax.numpy as jnp
import numpy as np

from dspark_jax.sampling import Sampling

V, K = 4, 3
PATHS = V**K
TOKENS = np.array(list(itertools.product(range(V), repeat=K)), np.int32)  # [X, K]
SETTINGS = (  # temperature, top_k, top_p, min_p
    (1.0, V, 1.0, 0.0),
    (0.7, V, 1.0, 0.0),
    (2.5, V, 1.0, 0.0),
    (0.0, V, 1.0, 0.0),
    (1.0, 2, 1.0, 0.0),
    (1.0, V, 0.7, 0.0),
    (1.0, V, 1.0, 0.3),
    (1.3, 3, 0.9, 0.1),
)


def make_worlds(seed, num):
    """Random target and draft tables, settings, windows and caps, flattened to rows."""
    rng = np.random.default_rng(seed)
    p_tables = [[] for _ in range(K + 1)]
    q_tables = [[] for _ in range(K)]
    setting, window, cap = [], [], []
    for index in range(num):
        kinds = ("plain", "zeros", "points")
        p_kind, q_kind = rng.choice(kinds), rng.choice([*kinds, "equal", "broken"])
        for level in range(K + 1):
            p = random_logits(rng, p_kind, (V**level, V))
            p_tables[level].append(p)
            if level == K:
                continue
            q = p if q_kind == "equal" else random_logits(rng, q_kind, p.shape)
            if q_kind == "broken":
                bad = rng.choice([np.nan, np.inf, -np.inf], size=p.shape)
                q = np.where(rng.random((len(p), 1)) < 0.5, bad, q).astype(np.float32)
            q_tables[level].append(q)
        setting.append(SETTINGS[index % len(SETTINGS)])
        choices = [np.full(PATHS, fixed) for fixed in range(K + 1)]
        choices += 4 * [predictable(rng)] + 4 * [np.full(PATHS, K)]
        window.append(choices[rng.integers(len(choices))])
        choices = [*choices[: K + 1], predictable(rng), *(6 * [np.full(PATHS, K)])]
        cap.append(choices[rng.integers(len(choices))])
    return {
        "p": [np.stack(level) for level in p_tables],
        "q": [np.stack(level) for level in q_tables],
        "settings": np.array(setting),
        "window": np.stack(window).astype(np.int32),
        "cap": np.stack(cap).astype(np.int32),
    }


def rows_of(worlds):
    """The arrays of one row per (world, path), and the settings [R]."""
    num = len(worlds["settings"])
    tokens = np.tile(TOKENS, (num, 1))
    temperature, top_k, top_p, min_p = np.repeat(worlds["settings"], PATHS, axis=0).T
    settings = Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
    )
    p_logits = at_prefixes(worlds["p"]).reshape(-1, K + 1, V)
    window, cap = worlds["window"].reshape(-1), worlds["cap"].reshape(-1)
    return (
        jnp.asarray(tokens),
        jnp.asarray(p_logits),
        jnp.asarray(window),
        jnp.asarray(cap),
        settings,
    )


def truth_of(worlds):
    return [
        np.stack(
            [
                reference_probs(table, settings)
                for table, settings in zip(level, worlds["settings"], strict=True)
            ]
        )
        for level in worlds["p"]
    ]


def at_prefixes(tables):
    """Tables of levels k, each [S, V^k, ...], read along every path: [S, X, k, ...]."""
    columns = [
        table[:, np.arange(PATHS) // V ** (K - level)]
        for level, table in enumerate(tables)
    ]
    return np.stack(columns, axis=2)


def reference_probs(logits, settings):
    """Hugging Face's order with a sort, in float64: logits [..., V], one setting."""
    temperature, top_k, top_p, min_p = settings
    if temperature == 0:
        return np.eye(V)[np.argmax(logits, axis=-1)]

    def softmax(x):
        with np.errstate(over="ignore"):
            e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    x = logits.astype(np.float64) / temperature
    kth = np.sort(x, axis=-1)[..., -min(int(top_k), V), None]
    x = np.where(x < kth, -np.inf, x)
    p = softmax(x)
    above = (p[..., None, :] * (p[..., None, :] > p[..., None])).sum(-1)
    x = np.where((above < top_p) | (top_p == 1), x, -np.inf)
    p = softmax(x)
    return softmax(np.where(p >= min_p * p.max(-1, keepdims=True), x, -np.inf))


def random_logits(rng, kind, shape):
    logits = rng.normal(size=shape) * rng.choice([0.5, 2.0])
    if kind == "zeros":
        hole = rng.random(shape) < 0.4
        hole[np.arange(len(hole)), rng.integers(V, size=len(hole))] = False
        logits = np.where(hole, -np.inf, logits)
    if kind == "points":
        points = rng.random(len(logits)) < 0.5
        only = np.eye(V, dtype=bool)[rng.integers(V, size=len(logits))]
        logits = np.where(points[:, None] & ~only, -np.inf, logits)
    return logits.astype(np.float32)


def predictable(rng):
    """A length in 0..K along every path whose {length > k} depends on x_1..x_k only."""
    keeps = [rng.random((1, V**level)) < 0.7 for level in range(K)]
    return np.cumprod(at_prefixes(keeps)[0], axis=1).sum(axis=1)
