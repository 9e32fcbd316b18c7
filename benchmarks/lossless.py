"""Are the words of speculative decoding those of plain decoding, on a real model?

Greedy on all prompts, and the seeded rule at a temperature on some. Where words differ,
the plain loop's own top-2 gap at that place is printed: rounding may flip a near tie.

python benchmarks/lossless.py --prompts FILE
"""

import jax
import jax.numpy as jnp
import numpy as np
from common import encode, load_models, load_prompts, log, pad, parser, save

import dspark_jax
from dspark_jax import noise


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
    def top2_gap(key, tokens, length, target_params, temperature):
        """Gap of the two best (perturbed) logits of the token at `length`."""
        cache = target.init_cache(1, tokens.shape[1])
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions = jnp.where(index < length, index, -1)
        hidden, _, _ = target.forward(target_params, tokens, positions, cache)
        logits = target.unembed(target_params, hidden[:, length - 1])
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
        gumbel = noise.token_gumbel(key[None], length[None], ids)
        best = jax.lax.top_k(logits + temperature * gumbel, 2)[0][0]
        return best[0] - best[1]

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
            for row, i in enumerate(part):
                rounds += int(b.stats.num_rounds[row])
                accepted_sum += int(b.stats.accepted_sum[row])
                first = len(prompts[i])
                x, y = (
                    a.tokens[row, first : a.lengths[row]],
                    b.tokens[row, first : b.lengths[row]],
                )
                if np.array_equal(x, y):
                    continue
                both = min(len(x), len(y))
                places = np.flatnonzero(x[:both] != y[:both])
                # One text may be the beginning of the other.
                at = int(places[0]) if places.size else both
                text = jnp.asarray(a.tokens[row : row + 1])
                gap = float(
                    top2_gap(
                        keys[row],
                        text,
                        jnp.int32(first + at),
                        target_params,
                        jnp.float32(temperature or 0.0),
                    )
                )
                differing.append(
                    {"id": records[i]["id"], "position": at, "top2_gap": gap}
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
            "is_lossless": all(d["top2_gap"] < options.gap for d in differing),
            "accepted_length": accepted_sum / rounds,
        }
    save("lossless", options, results)


if __name__ == "__main__":
    main()
