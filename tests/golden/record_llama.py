"""Records Hugging Face's logits of tiny random models: tests/golden/llama/*.

    python3.11 -m venv /tmp/hf
    /tmp/hf/bin/pip install torch==2.13.0 transformers safetensors numpy
    /tmp/hf/bin/python tests/golden/record_llama.py

Each folder is a checkpoint as transformers writes it, with tokens, logits and a
few hidden states in expected.safetensors. Recorded with torch 2.13.0+cpu, transformers
5.24.0.
"""

import pathlib

import numpy as np
import safetensors.numpy
import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 100000.0}
CASES = {
    "llama_plain": ("Llama", {"rope_parameters": PLAIN, "tie_word_embeddings": True}),
    "llama_llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama_linear_biases": (
        "Llama",
        {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2_plain": ("Qwen2", {"rope_parameters": PLAIN}),
}


def main():
    here = pathlib.Path(__file__).parent / "llama"
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (1, 100))
    for seed, (name, (family, settings)) in enumerate(CASES.items()):
        torch.manual_seed(seed)
        config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):  # Initialised to 0, which would test nothing.
                torch.nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            output = model(torch.from_numpy(tokens), output_hidden_states=True)
        model.save_pretrained(here / name)
        states = output.hidden_states  # embeddings, then every layer; the last normed
        expected = {
            "tokens": tokens.astype(np.int32),
            "logits": output.logits.numpy(),
            "layer_0": states[1].numpy(),
            "final": states[-1].numpy(),
        }
        safetensors.numpy.save_file(expected, here / name / "expected.safetensors")


if __name__ == "__main__":
    main()
