"""A tiny target with a tokenizer and its drafter as folders, and commands to run."""

import io
import json
import sys

import pytest

from dspark_jax import cli


@pytest.fixture(scope="session")
def target(chat_folder):
    return chat_folder


@pytest.fixture(scope="session")
def drafters(golden):
    """name -> folder of a drafter for the target."""
    return {
        name: golden / "cases" / name / "drafter"
        for name in ("dspark_vanilla_b4", "dspark_vanilla_b7", "dflash_b7")
    }


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [
        {"id": f"{domain}-{i}", "domain": domain, "prompt": f"{domain} {i}" * (i + 1)}
        for domain in ("sums", "tales")
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation(quick_compilation):
    """These tests compile more than they run."""


@pytest.fixture
def run(capsys):
    """Runs `dspark` and returns status, stdout and stderr."""

    def call(*arguments):
        try:
            status = cli.main([str(a) for a in arguments])
        except SystemExit as error:
            status = error.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out, err

    return call


@pytest.fixture
def run_json(run):
    """Runs `dspark` with --json, which must succeed, and returns the object."""

    def call(*arguments):
        status, out, err = run(*arguments, "--json")
        assert status == 0, err
        return json.loads(out.splitlines()[-1])

    return call


@pytest.fixture
def command(target, drafters):
    """`dspark generate` up to what a test adds."""
    drafter = drafters["dspark_vanilla_b4"]
    return ["generate", "--target", str(target), "--drafter", str(drafter)]


@pytest.fixture
def pipe(monkeypatch):
    """Puts bytes into stdin."""

    def into_stdin(content):
        text = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", text)

    return into_stdin
