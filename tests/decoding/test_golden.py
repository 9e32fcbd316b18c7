"""Decoding against DeepSpec's traces: every round, every number of the round.

`golden/README.md` says what is recorded; `golden/trim.py` what of it is kept here.
"""

import golden_traces
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import noise, sampling
from dspark_jax.decoding import verify
from dspark_jax.draft_sampler import DraftSampler
from dspark_jax.drafters import dspark
from dspark_jax.sampling import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")

CASES = (
    "dflash_b7",
    "dspark_gated_b4",
    "dspark_gated_b7",
    "dspark_rnn_b4",
    "dspark_rnn_b7",
    "dspark_vanilla_b4",
    "dspark_vanilla_b4_confplain",
    "dspark_vanilla_b7",
    "dspark_vanilla_b7_tied",
)


@pytest.mark.parametrize("case", CASES)
def test_traces_round_by_round(golden, case):
    golden_traces.check_traces(golden, case)


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_a_round(golden, case, monkeypatch):
    """Logits, hidden states, draft probabilities, acceptance and the next token's law.

    Drafted tokens and uniforms are the recorded ones.
    """
    loaded = golden_traces.load(golden, case)
    (target, target_params), (drafter, params), recorded, tensors = loaded
    config, length = drafter.config, drafter.config.block_size
    rounds = []  # (prefix of the tensors' names, text, recorded round, temperature)
    for index, trace in enumerate(recorded["traces"]):
        text = trace["prompt"] + trace["spec_tokens"]
        for j in range(3 if index == 0 else 1):
            rounds.append((f"t{index}.r{j}.", text, trace["rounds"][j], 1.0))
    for index, trace in enumerate(recorded["sampled"]):
        text = trace["prompt"] + trace["spec_tokens"]
        for j, one in zip(trace["indices"], trace["rounds"], strict=True):
            rounds.append((f"s{index}.r{j}.", text, one, trace["temperature"]))
    starts = np.array([one["start"] for _, _, one, _ in rounds], np.int32)
    texts = golden_traces.pad([text[: one["start"] + 1] for _, text, one, _ in rounds])
    anchors = texts[np.arange(len(rounds)), starts]
    forced = np.array([one["draft_tokens"] for _, _, one, _ in rounds], np.int32)
    temperatures = np.array([row[-1] for row in rounds], np.float32)
    uniform = np.zeros(forced.shape, np.float32)
    for b, (name, *_) in enumerate(rounds):
        uniform[b] = tensors.get(f"{name}uniforms", 0.0)

    def round_gumbel(streams, slot, ids):
        return jnp.where(ids == streams[0][:, slot, None], jnp.float32(1e6), 0.0)

    draw_block, inside = dspark._draw_block, {}

    def keep_inside(config, params, sampler, anchor, hidden, base_logits, *rest):
        inside.update(block_hidden=hidden, base_logits=base_logits)
        return draw_block(config, params, sampler, anchor, hidden, base_logits, *rest)

    monkeypatch.setattr(noise, "round_gumbel", round_gumbel)
    monkeypatch.setattr(dspark, "_draw_block", keep_inside)

    @jax.jit
    def run(
        target_params, params, texts, anchors, starts, forced, temperature, uniform
    ):
        batch, width = texts.shape
        settings = Sampling(temperature=temperature)
        offset = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), texts.shape)
        positions = jnp.where(offset < starts[:, None], offset, -1)
        cache = target.init_cache(batch, width + length + 1)
        state = drafter.init_state(batch, width + length + 1)
        hidden, taps, cache = target.forward(
            target_params, texts, positions, cache, tap_layers=config.tap_layers
        )
        prefill_logits = target.unembed(target_params, hidden)
        state = drafter.observe(params, state, texts, positions, taps)
        sampler = DraftSampler(
            key=jax.random.split(jax.random.key(0), batch),
            anchor_position=starts,
            sampling=settings,
            streams=(forced, forced),
            draft_length=length,
            rule="token",
        )
        draft, state = drafter.propose(
            params, target_params, state, anchors, starts, sampler
        )
        window = jnp.concatenate([anchors[:, None], draft.tokens], axis=1)
        rows = starts[:, None] + jnp.arange(length + 1, dtype=jnp.int32)[None]
        hidden, _, _ = target.forward(target_params, window, rows, cache)
        logits = target.unembed(target_params, hidden)
        row = sampling.make_row(logits, Sampling(temperature=temperature[:, None]))
        whole = jnp.full((batch,), length, jnp.int32)
        bounds = verify.make_bounds(draft, logits, row, whole, settings, rule="token")
        passes = bounds.passes(uniform)
        accepted = verify.count_accepted(passes, whole, rule="token")
        mass = verify.next_token_mass(
            draft, logits, row, bounds, accepted, whole, settings
        )
        q = [
            verify.draft_probability(
                draft, jnp.full((batch,), k, jnp.int32), settings, logits.shape[-1]
            )
            for k in range(length)
        ]
        found = {
            **inside,
            "corrected_logits": draft.logits,
            "target_logits": logits,
            "draft_probs": jnp.stack(q, axis=1),
            "next_token_probs": mass / mass.sum(-1, keepdims=True),
        }
        return found, draft.tokens, accepted, prefill_logits, taps

    arrays = (texts, anchors, starts, forced, temperatures, uniform)
    found, tokens, accepted, prefill_logits, taps = run(
        target_params, params, *map(jnp.asarray, arrays)
    )
    np.testing.assert_array_equal(tokens, forced)
    compared = set()
    for b, (name, _, one, _) in enumerate(rounds):
        for key, values in found.items():
            if name + key in tensors:
                atol = 1e-5 if key.endswith("probs") else 1e-4
                np.testing.assert_allclose(
                    values[b],
                    tensors[name + key],
                    atol=atol,
                    rtol=0,
                    err_msg=name + key,
                )
                compared.add(name[0] + key)
        if name.startswith("s"):
            assert int(accepted[b]) == one["accepted"]
            mask = tensors[f"{name}accept_prefix_mask"]
            assert int(mask.sum()) == one["accepted"]
    assert len(compared) == 8  # four of a trace, four of a sampled one
    for index in range(len(recorded["traces"])):
        b = next(i for i, row in enumerate(rounds) if row[0] == f"t{index}.r0.")
        for values, key in ((prefill_logits, "logits"), (taps, "context")):
            expected = tensors[f"t{index}.prefill_{key}"]
            np.testing.assert_allclose(
                values[b, : len(expected)], expected, atol=1e-4, rtol=0
            )
