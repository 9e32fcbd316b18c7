"""Are the words of speculative decoding those of plain decoding, on a real model?

Greedy on all prompts, and the seeded rule at a temperature on some. Where words differ,
the plain loop's own top-2 gap at that place is printed: rounding may flip a near tie.
The gap is read from the logits of plain decoding's own prefill and steps, run once more
at the same shapes; that the repetition draws the same words is checked and reported.

python benchmarks/lossless.py --prompts FILE
"""

import jax
import jax.numpy as jnp
import numpy as np
from common import encode, load_models, load_prompts, log, pad, parser, save

import dspark_jax
from dspark_jax import noise
from dspark_jax import sampling as sampling_lib
from dspark_jax.decoding import round as round_lib


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--max-new-tokens", type=int, default=64)
    arguments.add_argument("--draft-length", type=int, default=None)
    arguments.add_argument("--draft-vocabulary", type=int)
    arguments.add_argument("--seeded-prompts", type=int, default=20)
    arguments.add_argument("--seeded-temperature", type=float, default=0.8)
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--gap", type=float, default=5e-4)
    options = arguments.parse_args()
    target, target_params, drafter, drafter_params, tokenizer = load_models(
        options, draft_vocabulary=options.draft_vocabulary
    )
    records = load_prompts(options.prompts, options.limit)
    prompts = encode(tokenizer, records)
    shared = {
        "target": target,
        "max_new_tokens": options.max_new_tokens,
        "stop_tokens": tokenizer.stop_tokens,
    }

    @jax.jit
    def plain(keys, tokens, lengths, target_params, sampling):
        return dspark_jax.autoregressive_generate(
            keys,
            tokens,
            lengths,
            target_params=target_params,
            sampling=sampling,
            **shared,
        )

    @jax.jit
    def speculative(keys, tokens, lengths, target_params, drafter_params, sampling):
        return dspark_jax.speculative_generate(
            keys,
            tokens,
            lengths,
            target_params=target_params,
            drafter=drafter,
            drafter_params=drafter_params,
            sampling=sampling,
            options=dspark_jax.Speculation(
                rule="seeded", draft_length=options.draft_length
            ),
            **shared,
        )

    @jax.jit
    def plain_again(keys, tokens, lengths, target_params, sampling):
        """Plain decoding once more: its tokens [B, P + new] and the gap of each."""
        seen = []

        def unembed(params, hidden):
            seen.append(target.unembed(params, hidden))
            return seen[-1]

        watched = target._replace(unembed=unembed)
        capacity = tokens.shape[1] + options.max_new_tokens
        state = dspark_jax.prefill(
            keys,
            tokens,
            lengths,
            target_params=target_params,
            drafter=None,
            drafter_params=None,
            capacity=capacity,
            sampling=sampling,
            **{**shared, "target": watched},
        )
        stops = jnp.asarray(tokenizer.stop_tokens, jnp.int32)
        stops = jnp.broadcast_to(stops, (tokens.shape[0], stops.shape[0]))
        settings = sampling_lib.check_sampling(sampling, tokens.shape[0])

        def write(gaps, at, is_drawn):
            """Gap of the two best (perturbed) logits of the token drawn at `at`."""
            logits = seen.pop()
            if sampling.temperature is not None:
                ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
                gumbel = noise.token_gumbel(keys, at, ids)
                logits = logits + settings.temperature[:, None] * gumbel
            best = jax.lax.top_k(logits, 2)[0]
            at = jnp.where(is_drawn, at, capacity)
            rows = jnp.arange(at.shape[0], dtype=jnp.int32)
            return gaps.at[rows, at].set(best[:, 0] - best[:, 1], mode="drop")

        gaps = jnp.full((tokens.shape[0], capacity), jnp.inf, jnp.float32)
        gaps = write(gaps, lengths, lengths >= 0)

        def step(carry):
            state, gaps = carry
            after = round_lib.plain_step(
                state,
                target=watched,
                target_params=target_params,
                settings=settings,
                stop_tokens=stops,
            )
            return after, write(gaps, state.lengths, ~state.is_done)

        state, gaps = jax.lax.while_loop(
            lambda carry: jnp.any(~carry[0].is_done), step, (state, gaps)
        )
        return state.tokens, gaps

    root = jax.random.key(options.seed)
    results = {}
    step = max(len(prompts) // options.seeded_prompts, 1)
    some = list(range(0, len(prompts), step))[: options.seeded_prompts]
    for name, temperature, chosen in (
        ("greedy", None, list(range(len(prompts)))),
        ("seeded", options.seeded_temperature, some),
    ):
        sampling = dspark_jax.Sampling(temperature=temperature)
        differing, rounds, accepted_sum = [], 0, 0
        num_again = num_again_equal = 0
        for start in range(0, len(chosen), options.batch):
            part = chosen[start : start + options.batch]
            full = part + part[:1] * (options.batch - len(part))
            tokens, lengths = pad([prompts[i] for i in full], 256)
            keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(np.array(full))
            a = jax.device_get(plain(keys, tokens, lengths, target_params, sampling))
            b = jax.device_get(
                speculative(
                    keys, tokens, lengths, target_params, drafter_params, sampling
                )
            )
            again = None
            for row, i in enumerate(part):
                rounds += int(b.stats.num_rounds[row])
                accepted_sum += int(b.stats.accepted_sum[row])
                first = len(prompts[i])
                at = first_difference(
                    a.tokens[row, first : a.lengths[row]],
                    b.tokens[row, first : b.lengths[row]],
                )
                if at is None:
                    continue
                if again is None:
                    again = jax.device_get(
                        plain_again(keys, tokens, lengths, target_params, sampling)
                    )
                    for j in range(len(part)):
                        words = slice(len(prompts[part[j]]), a.lengths[j])
                        num_again += 1
                        num_again_equal += np.array_equal(
                            again[0][j, words], a.tokens[j, words]
                        )
                known = slice(first, first + at + 1)
                differing.append(
                    {
                        "id": records[i].id,
                        "position": at,
                        "top2_gap": float(again[1][row, first + at]),
                        "is_gap_of_the_loop": np.array_equal(
                            again[0][row, known], a.tokens[row, known]
                        ),
                    }
                )
                log(name, "differs:", differing[-1])
            log(
                f"{name}: {start + len(part)}/{len(chosen)} prompts, "
                f"{len(differing)} differ"
            )
        results[name] = {
            "temperature": temperature or 0.0,
            "num_prompts": len(chosen),
            "num_equal": len(chosen) - len(differing),
            "differing": differing,
            "gap_allowed": options.gap,
            "is_lossless": all(
                d["is_gap_of_the_loop"] and d["top2_gap"] < options.gap
                for d in differing
            ),
            # Rows of the batches with a difference, decoded plainly once more.
            "num_decoded_again": num_again,
            "num_decoded_again_equal": num_again_equal,
            "accepted_length": accepted_sum / rounds,
        }
    save("lossless", options, results)


def first_difference(x: np.ndarray, y: np.ndarray) -> int | None:
    """Index of the first token that differs, None if there is none."""
    if np.array_equal(x, y):
        return None
    both = min(len(x), len(y))
    places = np.flatnonzero(x[:both] != y[:both])
    # One text may be the beginning of the other.
    return int(places[0]) if places.size else both


if __name__ == "__main__":
    main()
