"""Tokens per second of decoding: plain, DSpark and prompt lookup, interleaved.

Every loop starts from the same prefilled state and only decoding is timed; whole calls
(prefill included) stand beside it. All loops take turns on each prompt, so that a slow
minute of the machine hits all of them. With --peer, Hugging Face transformers generates
the same prompts in a process of its own, in turn with the others.

python benchmarks/speed.py --prompts FILE --limit 3 --draft-lengths 3 5 7
"""

import json
import pathlib
import subprocess
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import encode, load_models, load_prompts, log, parser, save

import dspark_jax
from dspark_jax.drafters import dspark
from dspark_jax.evaluation import timing


def main() -> None:
    """Runs the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--max-new-tokens", type=int, default=96)
    arguments.add_argument("--draft-lengths", type=int, nargs="+", default=[4])
    arguments.add_argument("--lookup-lengths", type=int, nargs="*", default=[4])
    arguments.add_argument("--draft-vocabulary", type=int, nargs="*", default=[])
    arguments.add_argument("--batches", type=int, nargs="+", default=[1])
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--groups", type=int, default=12, help="batches to time")
    arguments.add_argument("--temperature", type=float, default=0.0)
    arguments.add_argument("--rule", default="token")
    arguments.add_argument("--peer", help="a python with torch and transformers")
    options = arguments.parse_args()
    if options.peer and (
        jax.default_backend() != "cpu"
        or options.dtype != "float32"
        or options.temperature
    ):
        arguments.error("--peer decodes greedily in float32 on a CPU, and so must we")
    target, target_params, drafter, drafter_params, tokenizer = load_models(options)
    records = load_prompts(options.prompts, options.limit)
    prompts = encode(tokenizer, records)
    drafters = {}
    for length in options.draft_lengths:
        drafters[f"dspark K={length}"] = (drafter, drafter_params, length)
    ids = _frequent_ids(options.drafter)
    for size in options.draft_vocabulary:
        if size > len(ids):
            raise SystemExit(f"the drafter lists {len(ids)} frequent ids, not {size}")
        small = dspark.with_draft_vocabulary(
            drafter_params, target, target_params, jnp.asarray(ids[:size])
        )
        for length in options.draft_lengths:
            drafters[f"dspark K={length} vocabulary={size}"] = (drafter, small, length)
    for length in options.lookup_lengths:
        lookup, nothing = dspark_jax.make_prompt_lookup(length)
        drafters[f"prompt lookup K={length}"] = (lookup, nothing, length)
    tables = {}
    for batch in options.batches:
        count = min(max(len(prompts) // batch, 1), options.groups)
        groups = [(prompts * batch)[i * batch : (i + 1) * batch] for i in range(count)]
        peer = None
        if options.peer and batch == 1:
            peer = Peer(options.peer, target, target_params)
        tables[str(batch)] = run(groups, options, target, target_params, drafters, peer)
    save("speed", options, {"batches": tables})


def run(
    groups: list,
    options: Any,
    target: Any,
    target_params: Any,
    drafters: dict,
    peer: "Peer | None",
) -> dict:
    """Times every loop on every group of prompts."""
    loops = {
        name: timing.Loop(
            drafter,
            drafter_params,
            dspark_jax.Speculation(draft_length=length, rule=options.rule),
        )
        for name, (drafter, drafter_params, length) in drafters.items()
    }
    others = {}
    if peer is not None:
        others["transformers"] = lambda group: peer.seconds(
            group[0], options.max_new_tokens
        )
    found = timing.compare(
        loops,
        groups,
        target=target,
        target_params=target_params,
        key=jax.random.key(options.seed),
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        others=others,
        log=log,
    )
    for name, one in found.items():
        log(
            f"{name:32s} {one.tokens_per_second:8.1f} tokens/s, "
            f"{one.speedup_over_plain_median:.2f}x, "
            f"τ {one.accepted_length or 1:.2f}"
        )
    return {
        name: {k: v for k, v in one._asdict().items() if v is not None}
        for name, one in found.items()
    }


class Peer:
    """Hugging Face transformers, greedy, float32, in a process of its own."""

    def __init__(self, python: str, target: Any, target_params: Any):
        import safetensors.numpy

        from dspark_jax.targets import load

        self.folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self.folder.name)
        block = target.config.block
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": target.config.vocab_size,
            "hidden_size": block.width,
            "intermediate_size": block.ffn_width,
            "num_hidden_layers": target.config.num_layers,
            "num_attention_heads": block.num_heads,
            "num_key_value_heads": block.num_kv_heads,
            "head_dim": block.head_width,
            "rms_norm_eps": block.rms_eps,
            "rope_theta": block.rope.theta,
            "max_position_embeddings": target.config.max_position,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {
            "model.embed_tokens.weight": target_params.embed,
            "model.norm.weight": target_params.final_norm,
        }
        for layer, params in enumerate(target_params.layers):
            tensors |= load.block_tensors(block, params, f"model.layers.{layer}.")
        safetensors.numpy.save_file(
            {name: np.asarray(value) for name, value in tensors.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        script = pathlib.Path(__file__).with_name("peer_transformers.py")
        if not (target.config.tied_embeddings and block.rope.kind == "default"):
            raise SystemExit("--peer takes a plain Llama with tied embeddings")
        self.process = subprocess.Popen(
            [python, str(script), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, prompt: list[int], max_new_tokens: int) -> float:
        """Seconds of decoding after the prompt, without the prefill's."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"prompt": prompt, "max_new_tokens": max_new_tokens}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def _frequent_ids(drafter: str) -> list[int]:
    folder = pathlib.Path(drafter)
    if not folder.is_dir():
        folder = pathlib.Path(dspark_jax.__file__).parent / "weights" / drafter
    path = folder / "draft_vocabulary.json"
    return json.loads(path.read_text())["ids"] if path.is_file() else []


if __name__ == "__main__":
    main()
