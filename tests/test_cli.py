"""`dspark` without any model: its help, and bad input is one line."""

import subprocess
import sys

import pytest

from dspark_jax import cli
from dspark_jax.commands import models

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


def test_help_needs_no_jax(package_environment):
    program = (
        "import sys; from dspark_jax import cli; cli.make_parser().print_help(); "
        "cli.main(['generate', '--help']) if 'jax' not in sys.modules else 1/0"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=package_environment,
        timeout=60,
    )
    assert "examples:" in done.stdout
    for option in ("--chat", "--compare", "--json", "--confidence-threshold"):
        assert option in done.stdout
