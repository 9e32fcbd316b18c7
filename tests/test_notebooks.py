"""Every notebook runs from top to bottom and uses public names only."""

import ast
import pathlib

import pytest

import dspark_jax

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FOREIGN = {"functools", "itertools", "jax", "matplotlib", "numpy", "typing"}


def read(path):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The kernel's sockets and loop are the notebook machinery's own affair.
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")
def test_runs(path, monkeypatch, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    package = pathlib.Path(dspark_jax.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel takes its own
    notebook = read(path)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=resources)
    client.execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_uses_public_names_and_holds_no_output(path):
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in cells)
    public = {*dspark_jax.__all__, "training", "evaluation", "serving"}
    for node in ast.walk(ast.parse("\n".join(cell.source for cell in cells))):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {node.module}
        else:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "dspark_jax" or node.attr in public, node.attr
            continue
        assert {m.split(".")[0] for m in modules - {"dspark_jax"}} <= FOREIGN, modules
