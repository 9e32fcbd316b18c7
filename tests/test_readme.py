"""The README's program runs as it stands there, and its links lead somewhere."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import dspark_jax

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
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
    links = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    local = [link for link in links if not link.startswith("http")]
    assert len(local) >= 4
    for link in local:
        assert (ROOT / link).exists(), link
