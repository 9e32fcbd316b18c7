"""Prompts: every template can be filled, draws are reproducible and varied."""

import numpy as np

from dspark_jax.training.texts import prompts

TEMPLATES = [
    template
    for kind in ("word_problems", "code", "instructions")
    for template in prompts.texts()[kind]
]


def test_every_template_can_be_filled():
    rng = np.random.default_rng(0)
    for template in TEMPLATES:
        text = prompts.fill(rng, template)
        assert "{" not in text
        assert len(text) > 10


def test_a_slot_has_one_value_in_a_prompt():
    rng = np.random.default_rng(0)
    for _ in range(20):
        first, second, again = prompts.fill(rng, "{name}|{name2}|{name}").split("|")
        assert first == again != second


def test_prompts_are_reproducible_and_varied():
    found = prompts.make_prompts(np.random.default_rng(1), 400)
    assert found == prompts.make_prompts(np.random.default_rng(1), 400)
    assert len(set(found)) > 360
    texts = [text for _, text in found]
    assert {domain for domain, _ in found} == set(prompts.DOMAINS)
    boxed = sum(prompt.endswith(prompts.BOXED) for prompt in texts) / 400
    assert 0.1 < boxed < 0.3  # half of the word problems
    assert sum('"""' in prompt for prompt in texts) > 20


def test_no_slot_stays_empty():
    found = prompts.make_prompts(np.random.default_rng(2), 400)
    for slot in ("{doc}", "{code}", "{function}"):
        assert not [text for _, text in found if slot in text]


def test_documented_functions_print_no_addresses():
    found = prompts.documented_functions()
    assert len(found) > 500
    assert not any(" at 0x" in signature for _, signature, _ in found)


def test_openings_are_distinct():
    openings = prompts.texts()["openings"]
    assert len(set(openings)) == len(openings) > 75
