"""Every cause of a failure, provoked on a tiny target."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.training import target_states, vocabulary
from dspark_jax.training.runs import (
    diagnosis,
    run_folder,
    saving,
    self_written,
    training_data,
)
from dspark_jax.training.runs.progress import Progress
from dspark_jax.training.runs.stopping import Stop

pytestmark = pytest.mark.usefixtures("quick_compilation")

SIZES = {"seed": 0, "batch_rows": 8, "held_out_rows": 8, "vocab_size": 512}


@pytest.fixture(name="own", scope="module")
def _own(root, tiny, tmp_path_factory):
    """Measures a text of the target's own, with changes to it."""
    config = tiny.config(root)
    target, params = tiny.random_target()
    folder = run_folder.open_folder(tmp_path_factory.mktemp("own") / "a", config)
    self_written.prepare(
        folder,
        config,
        target,
        params,
        tiny.ByteTokenizer(),
        num_batches=None,
        progress=Progress(),
        stop=Stop(),
    )
    rows, _ = saving.load_rows(folder.corpus)
    head = vocabulary.head_matrix(target, params)

    def measure(change=lambda rows: rows, steps=1000, tree=(), **changes):
        data = training_data.of_rows(change(rows), **SIZES)
        settings = {
            "target": target,
            "target_params": params,
            "head": head,
            "tap_layers": (1, 3),
            "tap_scale": (1.0, 1.0),
            "num_anchors": 8,
            "num_rows": 50_000,
        }
        found = diagnosis.measure(
            data.held_out, data.token_counts, **settings | changes
        )
        return diagnosis.at_step(found, {"a": tree}, step=steps, batch_rows=8)

    return measure


@pytest.fixture(name="scale", scope="module")
def _scale(tiny):
    target, params = tiny.random_target()
    batch = target_states.Batch(
        tokens=jax.random.randint(jax.random.key(0), (2, 30), 0, 512),
        loss_mask=jnp.ones((2, 30), jnp.bool_),
    )
    states = target_states.compute(target, params, batch, (1, 3))
    return target_states.measure_tap_scale(states, 2)


def test_its_own_text_is_not_blamed(own, scale):
    found = own(tap_scale=scale)
    assert diagnosis.causes(found) == []
    assert found.excess_surprise < 0.2
    assert found.text_agreement > max(found.shifted_agreement.values())
    assert 0.3 < found.supervised_share < 0.7
    lines = diagnosis.describe({"a": "acceptance is low"}, found)
    assert lines[0] == "a fails to learn: acceptance is low"
    assert lines[1] == "none of the known causes was found"
    assert lines[2].startswith("checked: supervised ")


def shuffled(rows):
    tokens = np.random.default_rng(0).integers(512, size=rows.tokens.shape)
    return rows.replace(tokens=tokens.astype(np.uint16))


def hardly_supervised(rows):
    columns = np.arange(rows.tokens.shape[1])
    mask = np.broadcast_to((columns >= 70) & (columns < 73), rows.tokens.shape)
    return rows.replace(loss_mask=np.array(mask))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"change": shuffled}, "nats a token more than its own would"),
        ({"change": hardly_supervised}, "only 3.8% of the tokens are supervised"),
        ({"change": hardly_supervised}, "a row has 2.0 anchors of the 64 asked for"),
        ({"tap_scale": (1e-6, 1.0)}, "tap layer 1 has rms .* 1 is aimed at"),
        ({"tap_layers": (0,), "tap_scale": (1.0,)}, r"\[0\] see only the first third"),
        ({"num_rows": 40}, r"little data: 40 rows, each seen 200\.0 times"),
        ({"steps": 20}, "short training: 20 steps"),
        ({"tree": {"w": jnp.asarray([1.0, jnp.nan])}}, "1 parameters of a are NaN or"),
    ],
)
def test_causes(own, how, message):
    if "num_rows" not in how:
        how = {"num_anchors": 64} | how
    found = diagnosis.causes(own(**how))
    assert any(re.search(message, cause) for cause in found), found


def test_a_shift_between_text_and_states(own):
    found = own()
    agreement = {-1: 0.02, 1: 0.7}
    shifted_text = found._replace(text_agreement=0.03, shifted_agreement=agreement)
    assert diagnosis.causes(shifted_text)[0] == (
        "the target's argmax agrees with 3.0% of the tokens, but with 70.0% after a "
        "shift by +1: text and target states are not aligned"
    )


def test_a_few_chance_agreements_are_no_shift(own, scale):
    noise = {-1: 0.0, 1: 0.006}
    found = own(tap_scale=scale)._replace(text_agreement=0.003, shifted_agreement=noise)
    assert diagnosis.causes(found) == []


def test_no_supervised_token_at_all(own):
    found = own(lambda rows: rows.replace(loss_mask=np.zeros_like(rows.loss_mask)))
    assert found.supervised_share == found.anchors_per_row == 0
    assert np.isnan(found.excess_surprise)
    assert "only 0.0% of the tokens are supervised" in diagnosis.causes(found)[0]


@pytest.mark.parametrize(
    ("accept", "loss", "message"),
    [
        (0.6, 1.0, None),
        (0.05, 1.0, "acceptance of the first slot is 0.050, near zero"),
        (0.21, 1.0, "no better than 0.200 for drafts from word frequencies alone"),
        (float("nan"), 1.0, "near zero"),
        (0.6, float("inf"), "not finite"),
    ],
)
def test_who_fails(own, accept, loss, message):
    findings = own()._replace(unigram_accept_rate=0.2)
    held_out = {"a": {"accept_rate": [accept, 0.0], "loss": loss}}
    found = diagnosis.failing(held_out, findings)
    if message is None:
        assert found == {}
    else:
        assert message in found["a"]
