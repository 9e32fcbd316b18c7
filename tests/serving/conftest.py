"""A tiny target and drafter, and the words of plain decoding that requests must get."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax import serving
from dspark_jax.testing import make_tiny_models

VOCAB, MAX_PROMPT, MAX_NEW = 19, 13, 18


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request, and what plain decoding says to it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_tokens: tuple[int, ...]
    words: tuple[int, ...]
    finish_reason: str

    def submit(self, engine, **kwargs):
        return engine.submit(
            list(self.prompt),
            max_new_tokens=self.max_new_tokens,
            sampling=dspark_jax.Sampling(temperature=self.temperature),
            seed=self.seed,
            stop_tokens=self.stop_tokens,
            **kwargs,
        )

    def check(self, handle):
        assert tuple(handle.tokens) == self.words
        assert handle.finish_reason == self.finish_reason


@pytest.fixture(scope="session")
def models():
    return make_tiny_models(vocab_size=VOCAB)


@pytest.fixture(scope="session")
def asked(models) -> list[Asked]:
    """24 requests of many lengths, and their words."""
    rng, count = np.random.default_rng(0), 24
    lengths = rng.integers(1, MAX_PROMPT + 1, size=count)
    limits = rng.integers(1, MAX_NEW + 1, size=count)
    lengths[:2], limits[:2] = (1, MAX_PROMPT), (MAX_NEW, MAX_NEW)
    tokens = rng.integers(VOCAB, size=(count, MAX_PROMPT))
    temperatures = rng.choice([0.0, 0.7, 1.3], size=count).astype(np.float32)
    stops = np.where(rng.random((count, 2)) < 0.4, rng.integers(VOCAB, size=2), -1)
    seeds = np.arange(100, 100 + count)
    keys = jnp.stack([jax.random.key(int(seed)) for seed in seeds])
    words = jax.jit(
        lambda params: dspark_jax.autoregressive_generate(
            keys,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(lengths, jnp.int32),
            target=models.target,
            target_params=params,
            max_new_tokens=MAX_NEW,
            sampling=dspark_jax.Sampling(temperature=temperatures),
            limits=jnp.asarray(limits, jnp.int32),
            stop_tokens=jnp.asarray(stops, jnp.int32),
        )
    )(models.target_params)
    return [
        Asked(
            prompt=tuple(tokens[row, : lengths[row]].tolist()),
            max_new_tokens=int(limits[row]),
            temperature=float(temperatures[row]),
            seed=int(seeds[row]),
            stop_tokens=tuple(int(t) for t in stops[row] if t >= 0),
            words=tuple(words.tokens[row, lengths[row] : words.lengths[row]].tolist()),
            finish_reason=dspark_jax.FINISH_REASONS[int(words.finish[row])],
        )
        for row in range(count)
    ]


@pytest.fixture(scope="session")
def make_engine(models):
    """(mode, fields of the configuration) -> a small Engine of the rule "seeded"."""

    def make(mode, *, costs=None, models=models, **fields):
        slots = fields.get("num_slots", 3)
        width = 1 + models.drafter.config.block_size
        shapes = {
            "plain": (1,),
            "static": (width,),
            "compact": (1, 2, width),
            "cap-accept": (width,),
        }[mode]
        config = serving.EngineConfig(
            **{
                "num_slots": slots,
                "max_length": 32,
                "page_size": 4,
                "chunk": 4,
                "prefill_groups": 2,
                "max_stop_tokens": 2,
                "rule": "seeded",
                "mode": mode,
                "buckets": tuple(serving.Bucket(slots, slots * n) for n in shapes),
                **fields,
            }
        )
        return serving.Engine(*models, config=config, costs=costs)

    return make
