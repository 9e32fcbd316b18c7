"""DeepSpec's recorded traces: loaded, and compared with this library's rounds."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

import dspark_jax
from dspark_jax import tensor_files
from dspark_jax.drafters.load import load_drafter
from dspark_jax.targets.load import load_target

NEW = 32  # tokens of a recorded trace


@functools.cache
def load(golden, case):
    target_name = "qwen3_tied" if case.endswith("tied") else "qwen3_untied"
    target, target_params = load_target(golden / "targets" / target_name)
    folder = golden / "cases" / case
    drafter, params = load_drafter(folder / "drafter", target)
    traces = json.loads((folder / "decode.json").read_text())
    tensors = tensor_files.read(folder / "decode.safetensors")
    return (target, target_params), (drafter, params), traces, tensors


def pad(rows, fill=0):
    width = max(map(len, rows))
    return np.array([[*row, *[fill] * (width - len(row))] for row in rows], np.int32)


def check_traces(golden, case):
    """All traces, thresholds and stop tokens of a case in one batch, round by round."""
    (target, target_params), (drafter, params), recorded, _ = load(golden, case)
    length = drafter.config.block_size
    traces = []
    for trace in recorded["traces"]:
        traces.append(trace)
        traces += [v | {"prompt": trace["prompt"]} for v in trace["variants"]]
    prompts = pad([trace["prompt"] for trace in traces])
    lengths = np.array([len(trace["prompt"]) for trace in traces], np.int32)
    stops = pad([[*trace.get("stop_token_ids", []), -1] for trace in traces], fill=-1)
    thresholds = [trace.get("confidence_threshold", 0.0) for trace in traces]
    num_rounds = max(len(trace["rounds"]) for trace in traces)
    has_confidence = drafter.config.confidence_kind != "none"

    @jax.jit
    def run(target_params, params, limits):
        models = {
            "target": target,
            "target_params": target_params,
            "drafter": drafter,
            "drafter_params": params,
            "stop_tokens": jnp.asarray(stops),
        }
        state = dspark_jax.prefill(
            jax.random.key(0),
            jnp.asarray(prompts),
            jnp.asarray(lengths),
            capacity=prompts.shape[1] + NEW + length + 1,
            max_new_tokens=NEW + length + 1,
            limits=limits,
            **models,
        )
        threshold = jnp.asarray(thresholds, jnp.float32) if has_confidence else None

        def step(state, _):
            state, info = dspark_jax.speculative_round(
                state, confidence_threshold=threshold, **models
            )
            return state, (info, state.stats.accepted_sum, state.stats.num_rounds)

        return jax.lax.scan(step, state, None, length=num_rounds + 2)

    rows = len(traces)
    _, (info, accepted_sum, counted) = run(
        target_params, params, jnp.full((rows,), NEW + length + 1, jnp.int32)
    )
    drafted = np.asarray(info.draft.tokens)
    for b, trace in enumerate(traces):
        for index, expected in enumerate(trace["rounds"]):
            tokens = drafted[index, b]
            is_stop = np.isin(tokens, trace.get("stop_token_ids", []))
            window = expected["draft_token_count"]
            if is_stop[:window].any():
                window = int(np.argmax(is_stop)) + 1
            assert int(info.verify_length[index, b]) == window
            assert int(info.num_accepted[index, b]) == expected["accepted"]
            assert int(info.next_token[index, b]) == expected["next_token"]
            if "draft_tokens" in expected:
                np.testing.assert_array_equal(tokens, expected["draft_tokens"])
            if "confidence_logits" in expected:
                np.testing.assert_allclose(
                    info.draft.confidence_logits[index, b],
                    expected["confidence_logits"],
                    atol=1e-5,
                )
        last = len(trace["rounds"]) - 1
        assert int(counted[last, b]) == last + 1
        assert int(accepted_sum[last, b]) == sum(trace["acceptance_lengths"])
        if "tau" in trace:
            found = int(accepted_sum[last, b]) / (last + 1)
            np.testing.assert_allclose(found, trace["tau"])

    state, _ = run(target_params, params, jnp.full((rows,), NEW, jnp.int32))
    assert bool(state.is_done.all())
    for b, trace in enumerate(traces):
        text = np.asarray(state.tokens[b, lengths[b] : state.lengths[b]])
        np.testing.assert_array_equal(text, trace["spec_tokens"][:NEW])
        if "greedy_tokens" in trace:
            np.testing.assert_array_equal(text, trace["greedy_tokens"])
