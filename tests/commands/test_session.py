"""A session of `dspark generate`: what is fed and remembered, and what is compiled."""

import functools

import jax
import one_prompt
import pytest

import dspark_jax
from dspark_jax.commands import session


def test_chat_feeds_new_turns_only_and_remembers(
    run_json, command, target, monkeypatch, pipe
):
    fed = []
    start_turn = session.Session.start_turn

    def watched(self, ids, *arguments, **keywords):
        fed.append((len(self.history), list(ids)))
        return start_turn(self, ids, *arguments, **keywords)

    monkeypatch.setattr(session.Session, "start_turn", watched)
    pipe(b"how are you?\n\nand then?\n")
    report = run_json(*command, "--chat", "--max-new-tokens", 12, "hello")
    assert [turn["num_new_tokens"] for turn in report["turns"]] == [12, 12, 12]
    text = dspark_jax.load_tokenizer(target)
    end = text.encode("<|im_end|>")
    history, turns = [], iter(report["turns"])
    model, params = dspark_jax.load_target(target)
    plain_generate = jax.jit(
        functools.partial(
            dspark_jax.autoregressive_generate, target=model, max_new_tokens=12
        )
    )
    for prompt in ("hello", "how are you?", "and then?"):
        turn = text.encode_chat([{"role": "user", "content": prompt}])
        new = turn if not history else [*end, *text.encode("\n"), *turn]
        assert fed.pop(0) == (len(history), new)
        history += new
        plain = plain_generate(
            jax.random.key(0), *one_prompt.batch(history, 128), target_params=params
        )
        answer = plain.tokens[0, len(history) : len(history) + 12].tolist()
        assert next(turns)["tokens"] == answer
        history += answer


def test_a_conversation_outgrows_its_caches(run, run_json, command, pipe):
    pipe(("a b c d e f g h i j k\n" * 4).encode())
    report = run_json(*command, "--chat", "--max-new-tokens", 8)
    assert len(report["turns"]) == 4
    pipe(("a b c d e f g h i j k\n" * 9).encode())
    status, out, err = run(*command, "--chat", "--max-new-tokens", 8)
    assert status == 2
    assert out.count("\n") >= 5
    assert "more than the 256 positions of the target" in err


def test_no_cache_is_longer_than_the_target(run_json, command, monkeypatch):
    """100,000 tokens are asked for, and the target has positions for 256."""
    capacities = []
    prefill = session.stepwise.prefill

    def counted(*arguments, **keywords):
        capacities.append(keywords["capacity"])
        return prefill(*arguments, **keywords)

    monkeypatch.setattr(session.stepwise, "prefill", counted)
    command += ["--candidates", "6"]  # nothing was compiled for it yet
    short, long = (
        run_json(*command, "--max-new-tokens", most, "a b") for most in (60, 100_000)
    )
    assert long["tokens"][:60] == short["tokens"]
    assert long["num_prompt_tokens"] + long["num_new_tokens"] == 257
    assert long["finish_reason"] == "length"
    assert capacities[0] < capacities[1] <= 257 + 32  # the prompt's padding


def test_prompts_of_other_lengths_reuse_the_programs(run_json, command, monkeypatch):
    traces = []
    for name in ("prefill", "speculative_rounds"):
        function = getattr(session.stepwise, name)

        def counted(*arguments, function=function, **keywords):
            traces.append(function.__name__)
            return function(*arguments, **keywords)

        monkeypatch.setattr(session.stepwise, name, counted)
    command += ["--candidates", "5"]  # nothing was compiled for it yet
    for prompt, temperature in (("a", 0.5), ("hello", 0.7), ("b" * 12, 1.3)):
        run_json(
            *command,
            "--max-new-tokens",
            20,
            "--temperature",
            temperature,
            prompt,
        )
    assert sorted(traces) == ["prefill", "speculative_rounds"]


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 32), (32, 32), (33, 48), (48, 48), (49, 64), (97, 128), (129, 192)],
)
def test_bucket(size, expected):
    assert session.bucket(size) == expected
