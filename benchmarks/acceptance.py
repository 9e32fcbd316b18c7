"""Accepted length (τ) by domain, and conditional acceptance by position.

python benchmarks/acceptance.py --prompts FILE --temperatures 0 1
"""

import collections

import jax
import numpy as np
from common import DOMAINS, encode, load_models, load_prompts, log, pad, parser, save

import dspark_jax


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    arguments.add_argument("--rule", default="token")
    arguments.add_argument("--draft-length", type=int, default=7)
    arguments.add_argument("--max-new-tokens", type=int, default=96)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--draft-vocabulary", type=int)
    arguments.add_argument("--candidates", type=int)
    options = arguments.parse_args()
    target, target_params, drafter, drafter_params, tokenizer = load_models(
        options, draft_vocabulary=options.draft_vocabulary
    )
    records = load_prompts(options.prompts, options.limit)
    prompts = encode(tokenizer, records)

    @jax.jit
    def generate(keys, tokens, lengths, target_params, drafter_params, sampling):
        return dspark_jax.speculative_generate(
            keys,
            tokens,
            lengths,
            target=target,
            target_params=target_params,
            drafter=drafter,
            drafter_params=drafter_params,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            options=dspark_jax.Speculation(
                draft_length=options.draft_length,
                rule=options.rule,
                candidates=options.candidates,
            ),
            stop_tokens=tokenizer.stop_tokens,
        )

    tables = []
    root = jax.random.key(options.seed)
    # Alike lengths together: a batch runs to its slowest row, and is padded to its
    # longest; keys belong to the prompts, so that the order changes no word.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for temperature in options.temperatures:
        sampling = dspark_jax.Sampling(temperature=temperature or None)
        rows = [None] * len(prompts)
        for start in range(0, len(order), options.batch):
            chosen = order[start : start + options.batch]
            full = chosen + chosen[:1] * (options.batch - len(chosen))
            tokens, lengths = pad([prompts[i] for i in full], 128)
            keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(np.array(full))
            done = jax.device_get(
                generate(keys, tokens, lengths, target_params, drafter_params, sampling)
            )
            for row, i in enumerate(chosen):
                new = done.tokens[row, len(prompts[i]) : done.lengths[row]]
                stats = jax.tree.map(lambda x, row=row: x[row], done.stats)
                rows[i] = (stats, new.tolist())
            log(f"T={temperature}: {start + len(chosen)}/{len(prompts)} prompts")
        tables.append(summary(temperature, records, rows))
        save("acceptance", options, {"tables": tables})


def summary(temperature: float, records: list, rows: list) -> dict:
    """τ pooled by domain, its bootstrap interval over prompts, and by position."""
    result: dict = {"temperature": temperature, "domains": {}}
    domains = [record["domain"] for record in records]
    for domain in (*DOMAINS, "all"):
        chosen = [
            row for row, d in zip(rows, domains, strict=True) if domain in (d, "all")
        ]
        if not chosen:
            continue
        rounds = np.array([row[0].num_rounds for row in chosen])
        accepted_sum = np.array([row[0].accepted_sum for row in chosen])
        accepted = np.sum([row[0].accepted_at for row in chosen], axis=0)
        reached = np.sum([row[0].reached_at for row in chosen], axis=0)
        rng = np.random.default_rng(0)
        picks = rng.integers(0, len(chosen), (2000, len(chosen)))
        draws = accepted_sum[picks].sum(1) / np.maximum(rounds[picks].sum(1), 1)
        result["domains"][domain] = {
            "accepted_length": float(accepted_sum.sum() / rounds.sum()),
            "interval_95": [float(x) for x in np.percentile(draws, [2.5, 97.5])],
            "num_prompts": len(chosen),
            "num_rounds": int(rounds.sum()),
            "num_new_tokens": int(sum(len(row[1]) for row in chosen)),
            "conditional_acceptance": [
                float(a / r) if r else None
                for a, r in zip(accepted, reached, strict=True)
            ],
            "repeated_20gram_share": repeated_share([row[1] for row in chosen]),
        }
    by_domain = [
        result["domains"][d]["accepted_length"]
        for d in DOMAINS
        if d in result["domains"]
    ]
    result["mean_over_domains"] = float(np.mean(by_domain))
    for domain, row in result["domains"].items():
        log(f"T={temperature} {domain:14s} τ {row['accepted_length']:.3f}")
    log(f"T={temperature} mean over domains τ {result['mean_over_domains']:.3f}")
    return result


def repeated_share(texts: list[list[int]]) -> float:
    """Share of tokens that lie inside a 20-gram which occurs twice in its text."""
    inside = total = 0
    for text in texts:
        grams = collections.Counter(
            tuple(text[i : i + 20]) for i in range(len(text) - 19)
        )
        marked = np.zeros(len(text), bool)
        for i in range(len(text) - 19):
            if grams[tuple(text[i : i + 20])] > 1:
                marked[i : i + 20] = True
        inside, total = inside + int(marked.sum()), total + len(text)
    return inside / max(total, 1)


if __name__ == "__main__":
    main()
