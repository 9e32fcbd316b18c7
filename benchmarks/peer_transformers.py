"""The peer of `speed.py`: answers each request line with seconds of greedy decoding.

Runs in an environment with torch and transformers; needs nothing of dspark_jax.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    """Runs the benchmark."""
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], torch_dtype=torch.float32
    )
    model.eval()
    for line in sys.stdin:
        request = json.loads(line)
        prompt = torch.tensor([request["prompt"]])
        with torch.inference_mode():
            out = model(prompt, use_cache=True)
            cache, token = (
                out.past_key_values,
                out.logits[:, -1].argmax(-1, keepdim=True),
            )
            begin = time.perf_counter()
            for _ in range(request["max_new_tokens"] - 1):
                out = model(token, past_key_values=cache, use_cache=True)
                cache, token = (
                    out.past_key_values,
                    out.logits[:, -1].argmax(-1, keepdim=True),
                )
            print(time.perf_counter() - begin, flush=True)


if __name__ == "__main__":
    main()
