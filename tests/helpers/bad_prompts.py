"""A row per bad argument that both whole generations refuse, with the message.

Keys, prompts, limits, stop tokens and settings of sampling; bad_arguments.py says what
a row is.
"""

import jax
import numpy as np
from bad_arguments import MAX_POSITION, VOCAB, ints

from dspark_jax.sampling import Sampling


def sampled(**fields):
    return {"sampling": Sampling(**{"temperature": 1.0, **fields})}


VOCABULARY = "0..18 (the vocabulary)"
BOTH = {  # speculative_generate and autoregressive_generate
    "key raw": (
        lambda good: {"key": jax.random.PRNGKey(0)},
        TypeError,
        "`key` must be a typed key or typed keys [B] (jax.random.key), got uint32",
    ),
    "key a seed": (
        {"key": 3},
        TypeError,
        "`key` must be a typed key or typed keys [B] (jax.random.key), got int",
    ),
    "key count": (
        lambda good: {"key": jax.random.split(jax.random.key(0), 3)},
        ValueError,
        "`key` must have shape (B) = (2,), got (3,)",
    ),
    "tokens none": ({"tokens": None}, TypeError, "`tokens` must be an array or nested"),
    "tokens ragged": (
        {"tokens": [[1, 2], [3]]},
        TypeError,
        "`tokens` must be an array or nested lists of equal length, got [[1, 2], [3]]",
    ),
    "tokens rank": (
        {"tokens": ints(1, 2, 3)},
        ValueError,
        "`tokens` must have 2 axes (B P), got shape (3,)",
    ),
    "tokens dtype": (
        {"tokens": np.ones((2, 5), np.float32)},
        TypeError,
        "`tokens` must hold integers, got float32",
    ),
    "tokens bool": (
        {"tokens": np.ones((2, 5), bool)},
        TypeError,
        "`tokens` must hold integers, got bool",
    ),
    "tokens no request": (
        {"tokens": np.zeros((0, 5), np.int32), "lengths": ints()},
        ValueError,
        "`tokens` must hold at least one request, got 0",
    ),
    "tokens no column": (
        {"tokens": np.zeros((2, 0), np.int32)},
        ValueError,
        "`tokens` must hold at least one token a row, got 0",
    ),
    "tokens too large": (
        {"tokens": np.full((2, 5), VOCAB)},
        ValueError,
        f"`tokens` must lie in {VOCABULARY}, got 19",
    ),
    "tokens negative": (
        {"tokens": np.full((2, 5), -100)},
        ValueError,
        f"`tokens` must lie in {VOCABULARY}, got -100",
    ),
    "tokens of 64 bits": (
        {"tokens": np.full((2, 5), 2**32 + 1, np.int64)},
        ValueError,
        f"`tokens` must lie in {VOCABULARY}, got 4294967297",
    ),
    "tokens longer than the target": (
        {"tokens": np.full((2, MAX_POSITION + 1), 7, np.int32)},
        ValueError,
        "`tokens` must not be wider than the target's max_position 16, got 17",
    ),
    "lengths empty prompt": (
        {"lengths": ints(5, 0)},
        ValueError,
        "`lengths` must lie in 1..5, got 0",
    ),
    "lengths too long": (
        {"lengths": ints(5, 6)},
        ValueError,
        "`lengths` must lie in 1..5, got 6",
    ),
    "lengths shape": (
        {"lengths": ints(5, 3, 1)},
        ValueError,
        "`lengths` must have shape (B) = (2,), got (3,)",
    ),
    "lengths scalar": (
        {"lengths": 5},
        ValueError,
        "`lengths` must have shape (B) = (2,), got ()",
    ),
    "lengths dtype": (
        {"lengths": np.array([5.0, 3.0])},
        TypeError,
        "`lengths` must hold integers, got float",
    ),
    "target": ({"target": "gpt"}, TypeError, "`target` must be a Target, got str"),
    "max_new_tokens negative": (
        {"max_new_tokens": -1},
        ValueError,
        "`max_new_tokens` must be at least 0, got -1",
    ),
    "max_new_tokens float": (
        {"max_new_tokens": 4.0},
        TypeError,
        "`max_new_tokens` must be an int, got 4.0",
    ),
    "max_new_tokens bool": (
        {"max_new_tokens": True},
        TypeError,
        "`max_new_tokens` must be an int, got True",
    ),
    "max_new_tokens beyond int32": (
        {"max_new_tokens": 2**31},
        ValueError,
        "`max_new_tokens` must be at most 2147483647, got 2147483648",
    ),
    "max_new_tokens and the prompt beyond int32": (
        {"max_new_tokens": 2**31 - 1},
        ValueError,
        "`max_new_tokens` must leave room for the prompt below 2^31 tokens, got",
    ),
    "limits too large": (
        {"limits": ints(4, 5)},
        ValueError,
        "`limits` must lie in 0..max_new_tokens = 0..4, got 5",
    ),
    "limits negative": (
        {"limits": ints(-1, 4)},
        ValueError,
        "`limits` must lie in 0..max_new_tokens = 0..4, got -1",
    ),
    "limits shape": (
        {"limits": 4},
        ValueError,
        "`limits` must have shape (B) = (2,), got ()",
    ),
    "limits dtype": (
        {"limits": np.array([1.5, np.nan])},
        TypeError,
        "`limits` must hold integers, got float",
    ),
    "limits without tokens": (
        {"limits": ints(1, 0), "max_new_tokens": 0},
        ValueError,
        "`limits` must lie in 0..max_new_tokens = 0..0, got 1",
    ),
    "stop_tokens too large": (
        {"stop_tokens": (2, VOCAB)},
        ValueError,
        f"`stop_tokens` must lie in {VOCABULARY}, or be the padding -1, got 19",
    ),
    "stop_tokens negative": (
        {"stop_tokens": [-2]},
        ValueError,
        f"`stop_tokens` must lie in {VOCABULARY}, or be the padding -1, got -2",
    ),
    "stop_tokens float": (
        {"stop_tokens": [1.5]},
        TypeError,
        "`stop_tokens` must hold integers, got float",
    ),
    "stop_tokens scalar": (
        {"stop_tokens": 2},
        ValueError,
        "`stop_tokens` must have shape (n,) or (B, n) = (2, n), got ()",
    ),
    "stop_tokens rows": (
        {"stop_tokens": [[1], [2], [3]]},
        ValueError,
        "`stop_tokens` must have shape (n,) or (B, n) = (2, n), got (3, 1)",
    ),
    "stop_tokens a set": ({"stop_tokens": {2}}, TypeError, "`stop_tokens` must be an"),
    "num_samples": (
        {"num_samples": 0},
        ValueError,
        "`num_samples` must be at least 1, got 0",
    ),
    "num_samples float": (
        {"num_samples": 2.0},
        TypeError,
        "`num_samples` must be an int, got 2.0",
    ),
    "num_samples with keys per prompt": (
        lambda good: {"num_samples": 2, "key": jax.random.split(jax.random.key(0), 2)},
        ValueError,
        "`key` must have shape (B) = (4,), got (2,)",
    ),
    "return_state of nothing": (
        {"return_state": True, "max_new_tokens": 0},
        ValueError,
        "`return_state` needs `max_new_tokens` >= 1, got 0",
    ),
    "sampling": (
        {"sampling": 0.7},
        TypeError,
        "`sampling` must be a Sampling, got float",
    ),
    "temperature negative": (
        sampled(temperature=-0.5),
        ValueError,
        "`sampling.temperature` must be in [0, 1e+30], got -0.5",
    ),
    "temperature nan": (
        sampled(temperature=float("nan")),
        ValueError,
        "`sampling.temperature` must be in [0, 1e+30], got nan",
    ),
    "temperature beyond float32": (
        sampled(temperature=1e39),
        ValueError,
        "`sampling.temperature` must be in [0, 1e+30], got 1e+39",
    ),
    "temperature ragged": (
        sampled(temperature=[[1.0], [2.0, 3.0]]),
        TypeError,
        "`sampling.temperature` must be an array or nested lists of equal length",
    ),
    "temperature text": (
        sampled(temperature="hot"),
        TypeError,
        "`sampling.temperature` must hold numbers, got 'hot'",
    ),
    "temperature shape": (
        sampled(temperature=np.ones((3,), np.float32)),
        ValueError,
        "`sampling.temperature` must have shape () or (B,) = (2,), got (3,)",
    ),
    "top_k 0": (
        sampled(top_k=0),
        ValueError,
        "`sampling.top_k` must be in 1..2147483647, got 0",
    ),
    "top_k beyond int32": (
        sampled(top_k=np.int64(2**32 + 1)),
        ValueError,
        "`sampling.top_k` must be in 1..2147483647, got 4294967297",
    ),
    "top_k float": (
        sampled(top_k=2.5),
        TypeError,
        "`sampling.top_k` must hold integers, got 2.5",
    ),
    "top_p 0": (
        sampled(top_p=0.0),
        ValueError,
        "`sampling.top_p` must be in (0, 1], got 0.0",
    ),
    "top_p above 1": (
        sampled(top_p=1.5),
        ValueError,
        "`sampling.top_p` must be in (0, 1], got 1.5",
    ),
    "min_p": (
        sampled(min_p=2),
        ValueError,
        "`sampling.min_p` must be in [0, 1], got 2",
    ),
    "min_p of one row": (
        sampled(min_p=np.array([0.1, -0.1])),
        ValueError,
        "`sampling.min_p` must be in [0, 1], got [ 0.1 -0.1]",
    ),
    "cut without a temperature": (
        {"sampling": Sampling(top_p=0.9)},
        ValueError,
        "`sampling.top_p` needs `sampling.temperature`: without one decoding is greedy",
    ),
}
