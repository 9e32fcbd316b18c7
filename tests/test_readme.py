"""The README's program runs; commands and links of all documents are right."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import dspark_jax
from dspark_jax import cli
from pallas_kernels import bench

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
pytestmark = pytest.mark.skipif(not README.is_file(), reason="no README here")


@pytest.mark.slow
def test_the_program_runs(tmp_path):
    (program,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    package = pathlib.Path(dspark_jax.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    assert re.search(r"\S.*\n\d\.\d\d tokens a round\n$", done.stdout), done.stderr


def test_links_lead_somewhere():
    num_links = 0
    for document in DOCUMENTS:
        links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
        for link in links:
            if not link.startswith("http"):
                num_links += 1
                assert (document.parent / link).exists(), f"{document.name}: {link}"
    assert num_links > 10


def test_named_files_exist():
    """Paths in code spans that name a folder of the project."""
    folders = r"(?:benchmarks|configs|docs|notebooks|tests|dspark_jax|pallas_kernels)"
    num_names = 0
    for document in DOCUMENTS:
        for name in re.findall(rf"`({folders}/[^`\s]*)`", document.read_text()):
            num_names += 1
            assert any(ROOT.glob(name)), f"{document.name}: {name}"
    assert num_names > 10


def fenced_commands():
    """(document, words) of every command in a block of shell lines."""
    for document in DOCUMENTS:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.M | re.S)
        shell = [text for language, text in blocks if language in ("", "bash")]
        for line in "".join(shell).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while "&&" in words:
                yield document, words[: words.index("&&")]
                words = words[words.index("&&") + 1 :]
            if words:
                yield document, words


def test_commands_of_blocks_parse(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    bench_options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    num_commands = 0
    for document, words in fenced_commands():
        num_commands += 1
        if words[0] == "dspark":
            cli.make_parser().parse_args(words[1:])
        elif words[:3] == ["python", "-m", "pallas_kernels.bench"]:
            options = {word for word in words if word.startswith("--")}
            assert options <= bench_options, f"{document.name}: {words}"
        else:
            assert words[0] in ("pip", "pytest"), f"{document.name}: {words}"
            paths = [word for word in words if word.startswith("tests")]
            assert all((ROOT / path).exists() for path in paths), words
    assert num_commands > 15


def test_commands_in_sentences_have_their_options():
    """They leave out what does not matter: the command and the options must exist."""
    num_options = 0
    for document in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)
        for span in re.findall(r"`dspark ([^`]+)`", text):
            words = span.split()
            parser = cli.make_parser()
            while subcommands(parser):
                if not words:
                    break
                name = words.pop(0)
                assert name in subcommands(parser), f"{document.name}: dspark {span}"
                parser = subcommands(parser)[name]
            options = {word.split("=")[0] for word in words if word.startswith("--")}
            known = {o for a in parser._actions for o in a.option_strings}
            assert options <= known, f"{document.name}: dspark {span}"
            num_options += len(options)
    assert num_options > 10


def subcommands(parser):
    found = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
    return found[0] if found else {}
