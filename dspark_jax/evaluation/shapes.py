"""Shapes of published models, for benchmarks with random weights."""

from dspark_jax.config import BlockConfig, DecoderConfig, RopeConfig

QWEN3_4B = DecoderConfig(
    vocab_size=151_936,
    num_layers=36,
    block=BlockConfig(
        width=2560,
        num_heads=32,
        num_kv_heads=8,
        head_width=128,
        ffn_width=9728,
        rope=RopeConfig(theta=1e6),
        qk_norm=True,
    ),
    max_position=40_960,
)
TINY = DecoderConfig(
    vocab_size=512,
    num_layers=2,
    block=BlockConfig(
        width=32, num_heads=4, num_kv_heads=2, head_width=8, ffn_width=64
    ),
    max_position=2048,
)
