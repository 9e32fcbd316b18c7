"""`dspark generate` on a tiny target: what it prints, how it ends, how it says no."""

import functools
import os
import signal
import subprocess
import sys
import time

import jax
import one_prompt
import pytest

import dspark_jax
from dspark_jax import cli
from dspark_jax.commands import generate, models, session

FIELDS = {
    "text": str,
    "tokens": list,
    "num_prompt_tokens": int,
    "num_new_tokens": int,
    "finish_reason": str,
    "tokens_per_second": float,
    "seconds": float,
    "prefill_seconds": float,
    "first_token_seconds": float,
    "accepted_length": float,
    "num_rounds": int,
    "num_verified": int,
    "num_accepted": int,
    "rule": str,
    "temperature": float,
    "seed": int,
    "draft_length": int,
    "target": str,
    "drafter": str,
    "device": str,
}


@pytest.mark.parametrize(
    ("rule", "temperature", "candidates"), [("token", 0.0, None), ("block", 0.9, 64)]
)
def test_words_are_the_library_s(
    run_json, command, target, rule, temperature, candidates
):
    chosen = () if candidates is None else ("--candidates", candidates)
    report = run_json(
        *command, "--rule", rule, "--temperature", temperature, "--seed", 5,
        *chosen, "--max-new-tokens", 30, "hello",
    )  # fmt: skip
    model, params = dspark_jax.load_target(target)
    drafter, drafter_params = dspark_jax.load_drafter(command[-1], model)
    text = dspark_jax.load_tokenizer(target)
    ids = text.encode_chat([{"role": "user", "content": "hello"}])
    generate_all = functools.partial(
        dspark_jax.speculative_generate,
        target=model,
        drafter=drafter,
        max_new_tokens=30,
        options=dspark_jax.Speculation(rule=rule, candidates=candidates),
        stop_tokens=text.stop_tokens,
    )
    generation = jax.jit(generate_all)(
        jax.random.key(5),
        *one_prompt.batch(ids),
        target_params=params,
        drafter_params=drafter_params,
        sampling=dspark_jax.Sampling(temperature=temperature or None),
    )
    expected = generation.tokens[0, len(ids) : int(generation.lengths[0])].tolist()
    assert report["tokens"] == expected
    assert report["num_prompt_tokens"] == len(ids)
    assert report["num_rounds"] == int(generation.stats.num_rounds[0])
    assert report["accepted_length"] == pytest.approx(
        float(generation.stats.accepted_length), rel=1e-6
    )
    code = int(generation.finish[0])
    assert report["finish_reason"] == dspark_jax.FINISH_REASONS[code]
    words = expected[:-1] if report["finish_reason"] == "stop" else expected
    assert report["text"] == text.decode(words)


def test_json_fields(run_json, command):
    report = run_json(*command, "--max-new-tokens", 9, "hello")
    assert list(report) == list(FIELDS)
    for name, kind in FIELDS.items():
        assert isinstance(report[name], kind), name
    assert report["num_new_tokens"] == len(report["tokens"]) == 9
    assert report["finish_reason"] == "length"


def test_one_token_needs_no_round(run_json, command):
    report = run_json(*command, "--max-new-tokens", 1, "hello")
    assert report["num_new_tokens"] == 1
    assert report["num_rounds"] == 0
    assert report["accepted_length"] is None
    assert report["tokens_per_second"] is None


@pytest.mark.parametrize("drafter", ["prompt-lookup", "none"])
def test_every_drafter_gives_the_same_words(run_json, command, drafter):
    wanted = run_json(*command, "--max-new-tokens", 30, "hello")
    report = run_json(*command[:-1], drafter, "--max-new-tokens", 30, "hello")
    assert report["tokens"] == wanted["tokens"]
    assert report["drafter"] == drafter
    assert (report["accepted_length"] is None) == (drafter == "none")


@pytest.mark.parametrize(
    ("extra", "is_expected"),
    [
        ((), True),
        (("--temperature", "0.8", "--rule", "seeded"), True),
        (("--temperature", "0.8", "--rule", "token"), False),
    ],
)
def test_compare(run, run_json, command, extra, is_expected):
    arguments = (*command, "--compare", "--max-new-tokens", "30", *extra, "hello")
    report = run_json(*arguments)
    assert report["is_equality_expected"] == is_expected
    assert report["is_equal"] == is_expected
    if is_expected:
        assert report["first_difference"] is None
        assert report["plain"]["num_new_tokens"] == report["num_new_tokens"]
    else:
        assert 0 <= report["first_difference"] < 30
    assert report["speedup"] == pytest.approx(
        report["tokens_per_second"] / report["plain"]["tokens_per_second"]
    )
    status, out, _ = run(*arguments)
    assert status == 0
    assert out.startswith(report["text"])
    words = "the words are equal" if is_expected else "as they may: rule 'token'"
    for part in ("speculative", "plain", "times the speed", "accepted length", words):
        assert part in out


def test_a_comparison_times_the_first_token_of_a_user_without_it(
    run_json, command, monkeypatch
):
    warm_up, ended = session.Session.warm_up, []

    def watched(*arguments):
        turn = warm_up(*arguments)
        ended.append(time.perf_counter())
        return turn

    monkeypatch.setattr(session.Session, "warm_up", watched)
    began = time.perf_counter()
    report = run_json(*command, "--compare", "--max-new-tokens", 4, "hello")
    assert 0 < report["prefill_seconds"] < report["first_token_seconds"]
    assert report["first_token_seconds"] < ended[0] - began


def test_the_text_alone_is_on_stdout(run, run_json, command):
    report = run_json(*command, "--max-new-tokens", 30, "hello")
    status, out, err = run(*command, "--max-new-tokens", 30, "hello")
    assert status == 0
    assert out == report["text"] + "\n"
    assert "tokens/s; accepted length" in err


def test_streams_whole_characters(run_json, command, monkeypatch):
    pieces = []
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", pieces.append)
        cli.main([*command, "--max-new-tokens", "30", "hello"])
    assert len(pieces) > 5
    report = run_json(*command, "--max-new-tokens", 30, "hello")
    assert "".join(pieces) == report["text"] + "\n"


@pytest.mark.parametrize("text", ["def f(x):", "def f(x):\n"])
def test_raw_prompts_from_stdin(run_json, command, target, pipe, text):
    pipe(text.encode())
    report = run_json(*command, "--raw", "--max-new-tokens", 4)
    ids = dspark_jax.load_tokenizer(target).encode(text)
    assert report["num_prompt_tokens"] == len(ids)


@pytest.fixture
def _default_ctrl_c():
    """A process that was started in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_ctrl_c")
def test_ctrl_c_prints_what_there_is(run, run_json, command, monkeypatch):
    step, calls = session.Session.step, []

    def interrupted_step(self, turn):
        calls.append(len(turn.tokens))
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        step(self, turn)

    wanted = run_json(*command, "--max-new-tokens", 30, "hello")
    monkeypatch.setattr(session.Session, "step", interrupted_step)
    status, out, err = run(*command, "--max-new-tokens", 30, "hello")
    assert status == 130
    assert len(calls) == 3
    assert len(out) > 3
    assert wanted["text"].startswith(out[:-1].rstrip("\ufffd"))
    assert "interrupted" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-length", "9", "x"], "--draft-length must be at most the drafter"),
        (
            ["--draft-vocabulary", "9", "x"],
            "draft_vocabulary.json, which is missing",
        ),
        (
            ["--drafter", "nosuch", "x"],
            "--drafter must be one of 'dspark-smollm2-135m', a folder or a hub name",
        ),
        (["--target", "nosuch", "x"], "--target must be 'smollm2-135m', a folder"),
        (["x" * 400], "more than the 256 positions of the target"),
    ],
)
def test_what_only_the_models_can_refuse(run, command, arguments, message):
    status, out, err = run(*command, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_stdin_that_is_not_text(run, command, pipe):
    pipe(b"\xff\xfe")
    status, out, err = run(*command)
    assert (status, out) == (2, "")
    assert "stdin is not valid UTF-8" in err


def test_a_terminal_without_a_prompt(run, command, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    status, _, err = run(*command)
    assert status == 2
    assert "give a prompt, or pipe one into stdin" in err


def test_the_reader_goes_away(command, package_environment):
    line = [sys.executable, "-m", "dspark_jax.cli", *command, "hello"]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=package_environment
    )
    process.stdout.close()
    with process.stderr:
        error = process.stderr.read().decode()
    assert process.wait(timeout=120) == 141, error
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


def test_default_drafter_fits_the_default_target():
    assert models._default_drafter(generate.DEFAULT_TARGET) == "dspark-smollm2-135m"
    assert models._default_drafter("./other") == "prompt-lookup"
