"""Shapes and dtypes in the signatures are true: whole generations, checked at run time.

In a process of its own: the checks must be there before the package is imported, and
they would hide the library's own messages from the tests of bad input.
"""

import os
import pathlib
import subprocess
import sys

import pytest

import dspark_jax

PROGRAM = """
import functools

import jaxtyping

with jaxtyping.install_import_hook("dspark_jax", "typecheck.typecheck"):
    import dspark_jax
    from dspark_jax.drafters import dspark
    from dspark_jax.targets import decoder
import jax
import jax.numpy as jnp
from dspark_jax.config import BlockConfig

block = BlockConfig(width=16, num_heads=2, num_kv_heads=1, head_width=8, ffn_width=24)
config = dspark_jax.DecoderConfig(
    vocab_size=19, num_layers=3, block=block, max_position=64, stop_tokens=(2,)
)
target = decoder.make_target(config)
target_params = decoder.abstract(config)
int32 = jnp.dtype("int32")
tokens, lengths = jax.ShapeDtypeStruct((2, 5), int32), jax.ShapeDtypeStruct((2,), int32)
for kind in ("none", "vanilla", "gated", "rnn"):
    drafter_config = dspark_jax.DrafterConfig(
        vocab_size=19, num_layers=1, block=block, max_position=64, block_size=3,
        mask_token=1, tap_layers=(-1, 1), num_target_layers=3, markov_kind=kind,
        markov_rank=0 if kind == "none" else 4,
        confidence_kind="plain" if kind == "none" else "markov",
    )
    drafter = dspark.make_drafter(drafter_config, target)
    drafter_params = dspark.abstract(drafter_config)
    for rule in ("token", "block", "seeded"):
        generate = functools.partial(
            dspark_jax.speculative_generate, target=target, drafter=drafter,
            max_new_tokens=4, options=dspark_jax.Speculation(rule=rule),
            sampling=dspark_jax.Sampling(
                temperature=0.7, top_k=5, top_p=0.9, min_p=0.01
            ),
            confidence_threshold=0.1, return_logprobs=True,
        )
        generation = jax.eval_shape(
            lambda key, *rest: generate(
                key, *rest[:2], target_params=rest[2], drafter_params=rest[3]
            ),
            jax.random.key(3), tokens, lengths, target_params, drafter_params,
        )
        assert generation.tokens.shape == (2, 9)
print("checked")
"""
# An int is a float. Fields are not checked: `jax.tree.map` and `abstract` fill them
# with other things than arrays.
TYPECHECK = """
import beartype

checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))

def typecheck(function):
    return function if function.__name__ == "__init__" else checked(function)
"""


def test_signatures_hold_at_run_time(tmp_path):
    pytest.importorskip("beartype")
    package = str(pathlib.Path(dspark_jax.__file__).parents[1])
    (tmp_path / "typecheck.py").write_text(TYPECHECK)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([package, *sys.path])},
    )
    assert done.stdout == "checked\n", done.stderr[-3000:]
