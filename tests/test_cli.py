"""`dspark generate` on a tiny target: what it prints, and how it says no."""

import functools
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import dspark_jax
from dspark_jax import cli
from dspark_jax.commands import generate, models, session

pytestmark = pytest.mark.usefixtures("quick_compilation")

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


@pytest.fixture(scope="module")
def target(chat_folder):
    return chat_folder


@pytest.fixture
def options(target, golden):
    """The command line up to what a test adds."""
    drafter = golden / "cases" / "dspark_vanilla_b4" / "drafter"
    return ["generate", "--target", str(target), "--drafter", str(drafter)]


@pytest.fixture
def pipe(monkeypatch):
    """Puts bytes into stdin."""

    def into_stdin(content):
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", text)

    return into_stdin


def run(capsys, *arguments):
    status = cli.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def run_json(capsys, *arguments):
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("rule", "temperature", "candidates"), [("token", 0.0, None), ("block", 0.9, 64)]
)
def test_words_are_the_library_s(
    capsys, options, target, rule, temperature, candidates
):
    chosen = () if candidates is None else ("--candidates", candidates)
    report = run_json(
        capsys, *options, "--rule", rule, "--temperature", temperature, "--seed", 5,
        *chosen, "--max-new-tokens", 30, "hello",
    )  # fmt: skip
    model, params = dspark_jax.load_target(target)
    drafter, drafter_params = dspark_jax.load_drafter(options[-1], model)
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
        *batch_of_one(ids),
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


def test_json_fields(capsys, options):
    report = run_json(capsys, *options, "--max-new-tokens", 9, "hello")
    assert list(report) == list(FIELDS)
    for name, kind in FIELDS.items():
        assert isinstance(report[name], kind), name
    assert report["num_new_tokens"] == len(report["tokens"]) == 9
    assert report["finish_reason"] == "length"


def test_one_token_needs_no_round(capsys, options):
    report = run_json(capsys, *options, "--max-new-tokens", 1, "hello")
    assert report["num_new_tokens"] == 1
    assert report["num_rounds"] == 0
    assert report["accepted_length"] is None
    assert report["tokens_per_second"] is None


@pytest.mark.parametrize("drafter", ["prompt-lookup", "none"])
def test_every_drafter_gives_the_same_words(capsys, options, drafter):
    wanted = run_json(capsys, *options, "--max-new-tokens", 30, "hello")
    report = run_json(capsys, *options[:-1], drafter, "--max-new-tokens", 30, "hello")
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
def test_compare(capsys, options, extra, is_expected):
    arguments = (*options, "--compare", "--max-new-tokens", "30", *extra, "hello")
    report = run_json(capsys, *arguments)
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
    status, out, _ = run(capsys, *arguments)
    assert status == 0
    assert out.startswith(report["text"])
    words = "the words are equal" if is_expected else "as they may: rule 'token'"
    for part in ("speculative", "plain", "times the speed", "accepted length", words):
        assert part in out


def test_a_comparison_times_the_first_token_of_a_user_without_it(
    capsys, options, monkeypatch
):
    warm_up, ended = session.Session.warm_up, []

    def watched(*arguments):
        turn = warm_up(*arguments)
        ended.append(time.perf_counter())
        return turn

    monkeypatch.setattr(session.Session, "warm_up", watched)
    began = time.perf_counter()
    report = run_json(capsys, *options, "--compare", "--max-new-tokens", 4, "hello")
    assert 0 < report["prefill_seconds"] < report["first_token_seconds"]
    assert report["first_token_seconds"] < ended[0] - began


def test_the_text_alone_is_on_stdout(capsys, options):
    report = run_json(capsys, *options, "--max-new-tokens", 30, "hello")
    status, out, err = run(capsys, *options, "--max-new-tokens", 30, "hello")
    assert status == 0
    assert out == report["text"] + "\n"
    assert "tokens/s; accepted length" in err


def test_streams_whole_characters(capsys, options, monkeypatch):
    pieces = []
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "write", pieces.append)
        cli.main([*options, "--max-new-tokens", "30", "hello"])
    assert len(pieces) > 5
    report = run_json(capsys, *options, "--max-new-tokens", 30, "hello")
    assert "".join(pieces) == report["text"] + "\n"


@pytest.mark.parametrize("text", ["def f(x):", "def f(x):\n"])
def test_raw_prompts_from_stdin(capsys, options, target, pipe, text):
    pipe(text.encode())
    report = run_json(capsys, *options, "--raw", "--max-new-tokens", 4)
    ids = dspark_jax.load_tokenizer(target).encode(text)
    assert report["num_prompt_tokens"] == len(ids)


def test_chat_feeds_new_turns_only_and_remembers(
    capsys, options, target, monkeypatch, pipe
):
    fed = []
    start_turn = session.Session.start_turn

    def watched(self, ids, *arguments, **keywords):
        fed.append((len(self.history), list(ids)))
        return start_turn(self, ids, *arguments, **keywords)

    monkeypatch.setattr(session.Session, "start_turn", watched)
    pipe(b"how are you?\n\nand then?\n")
    report = run_json(capsys, *options, "--chat", "--max-new-tokens", 12, "hello")
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
            jax.random.key(0), *batch_of_one(history, 128), target_params=params
        )
        answer = plain.tokens[0, len(history) : len(history) + 12].tolist()
        assert next(turns)["tokens"] == answer
        history += answer


def test_a_conversation_outgrows_its_caches(capsys, options, pipe):
    pipe(("a b c d e f g h i j k\n" * 4).encode())
    report = run_json(capsys, *options, "--chat", "--max-new-tokens", 8)
    assert len(report["turns"]) == 4
    pipe(("a b c d e f g h i j k\n" * 9).encode())
    status, out, err = run(capsys, *options, "--chat", "--max-new-tokens", 8)
    assert status == 2
    assert out.count("\n") >= 5
    assert "more than the 256 positions of the target" in err


def test_no_cache_is_longer_than_the_target(capsys, options, monkeypatch):
    """100,000 tokens are asked for, and the target has positions for 256."""
    capacities = []
    prefill = session.stepwise.prefill

    def counted(*arguments, **keywords):
        capacities.append(keywords["capacity"])
        return prefill(*arguments, **keywords)

    monkeypatch.setattr(session.stepwise, "prefill", counted)
    options += ["--candidates", "6"]  # nothing was compiled for it yet
    short, long = (
        run_json(capsys, *options, "--max-new-tokens", most, "a b")
        for most in (60, 100_000)
    )
    assert long["tokens"][:60] == short["tokens"]
    assert long["num_prompt_tokens"] + long["num_new_tokens"] == 257
    assert long["finish_reason"] == "length"
    assert capacities[0] < capacities[1] <= 257 + 32  # the prompt's padding


def test_prompts_of_other_lengths_reuse_the_programs(capsys, options, monkeypatch):
    traces = []
    for name in ("prefill", "speculative_rounds"):
        function = getattr(session.stepwise, name)

        def counted(*arguments, function=function, **keywords):
            traces.append(function.__name__)
            return function(*arguments, **keywords)

        monkeypatch.setattr(session.stepwise, name, counted)
    options += ["--candidates", "5"]  # nothing was compiled for it yet
    for prompt, temperature in (("a", 0.5), ("hello", 0.7), ("b" * 12, 1.3)):
        run_json(
            capsys,
            *options,
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


@pytest.fixture
def _default_ctrl_c():
    """A process that was started in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_default_ctrl_c")
def test_ctrl_c_prints_what_there_is(capsys, options, monkeypatch):
    step, calls = session.Session.step, []

    def interrupted_step(self, turn):
        calls.append(len(turn.tokens))
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        step(self, turn)

    wanted = run_json(capsys, *options, "--max-new-tokens", 30, "hello")
    monkeypatch.setattr(session.Session, "step", interrupted_step)
    status, out, err = run(capsys, *options, "--max-new-tokens", 30, "hello")
    assert status == 130
    assert len(calls) == 3
    assert len(out) > 3
    assert wanted["text"].startswith(out[:-1].rstrip("\ufffd"))
    assert "interrupted" in err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


BAD_INPUT = [
    ([], "COMMAND"),
    (["paint"], "invalid choice: 'paint'"),
    (["generate", "--paint", "x"], "unrecognized arguments: --paint"),
    (["generate", "--rule", "fast", "x"], "argument --rule: invalid choice: 'fast'"),
    (
        ["generate", "--temperature", "hot", "x"],
        "argument --temperature: invalid float",
    ),
    (["generate", "--temperature", "-1", "x"], "--temperature must be a number >= 0"),
    (["generate", "--temperature", "nan", "x"], "--temperature must be a number >= 0"),
    (["generate", "--temperature", "inf", "x"], "--temperature must be a number >= 0"),
    (["generate", "--top-k", "5", "x"], "--top-k needs --temperature above 0"),
    (["generate", "--top-p", ".5", "x"], "--top-p needs --temperature above 0"),
    (["generate", "--min-p", ".5", "x"], "--min-p needs --temperature above 0"),
    (["generate", "--top-k", "0", "x"], "--top-k must be at least 1, got 0"),
    (["generate", "--top-p", "0", "x"], "--top-p must be in (0, 1], got 0.0"),
    (["generate", "--min-p", "1.5", "x"], "--min-p must be in [0, 1], got 1.5"),
    (["generate", "--seed", "-1", "x"], "--seed must be in 0..2^32-1, got -1"),
    (["generate", "--max-new-tokens", "0", "x"], "--max-new-tokens must be at least 1"),
    (["generate", "--draft-length", "0", "x"], "--draft-length must be at least 1"),
    (["generate", "--candidates", "0", "x"], "--candidates must be at least 1, got 0"),
    (
        ["generate", "--draft-vocabulary", "0", "x"],
        "--draft-vocabulary must be at least 1, got 0",
    ),
    (
        ["generate", "--confidence-threshold", "2", "x"],
        "--confidence-threshold must be in [0, 1], got 2.0",
    ),
    (["generate", "--chat", "--compare"], "--chat and --compare exclude each other"),
    (["generate", "--chat", "--raw"], "--chat and --raw exclude each other"),
    (
        ["generate", "--drafter", "none", "--compare", "x"],
        "--compare needs a drafter, not none",
    ),
    (
        ["generate", "--drafter", "prompt-lookup", "--candidates", "8", "x"],
        "--candidates needs a trained drafter, not prompt-lookup",
    ),
    (["generate", "--target", "./nowhere", "x"], "--target: no such file or folder"),
    (["generate", "--drafter", "./nowhere", "x"], "--drafter: no such file or folder"),
    (["generate", " "], "the prompt is empty"),
    (["generate", "\udcff"], "the prompt is not valid UTF-8"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT)
def test_bad_input_is_one_line_before_any_model(
    capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr(models, "load", None)
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("dspark")
    assert "error: " in err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-length", "9", "x"], "draft_length` must be at most"),
        (["--draft-vocabulary", "9", "x"], "draft_vocabulary.json, which is missing"),
        (["x" * 400], "more than the 256 positions of the target"),
    ],
)
def test_what_only_the_models_can_refuse(capsys, options, arguments, message):
    status, out, err = run(capsys, *options, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_stdin_that_is_not_text(capsys, options, pipe):
    pipe(b"\xff\xfe")
    status, out, err = run(capsys, *options)
    assert (status, out) == (2, "")
    assert "stdin is not valid UTF-8" in err


def test_a_terminal_without_a_prompt(capsys, options, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    status, _, err = run(capsys, *options)
    assert status == 2
    assert "give a prompt, or pipe one into stdin" in err


def test_the_reader_goes_away(options):
    command = [sys.executable, "-m", "dspark_jax.cli", *options, "hello"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    process.stdout.close()
    with process.stderr:
        error = process.stderr.read().decode()
    assert process.wait(timeout=120) == 141, error
    assert "Traceback" not in error
    assert "BrokenPipe" not in error


def test_help_needs_no_jax():
    program = (
        "import sys; from dspark_jax import cli; cli.make_parser().print_help(); "
        "cli.main(['generate', '--help']) if 'jax' not in sys.modules else 1/0"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        timeout=60,
    )
    assert "examples:" in done.stdout
    for option in ("--chat", "--compare", "--json", "--confidence-threshold"):
        assert option in done.stdout


def test_default_drafter_fits_the_default_target():
    assert models._default_drafter(generate.DEFAULT_TARGET) == "dspark-smollm2-135m"
    assert models._default_drafter("./other") == "prompt-lookup"


def environment():
    package = pathlib.Path(dspark_jax.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": str(package)}


def batch_of_one(ids, width=64):
    tokens = np.zeros((1, width), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens, np.array([len(ids)], np.int32)
