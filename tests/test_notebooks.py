"""Every notebook runs from top to bottom and uses public names only."""

import ast
import os
import pathlib
import shutil

import pytest

import dspark_jax

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FOREIGN = {"functools", "itertools", "jax", "matplotlib", "numpy", "optax", "typing"}
MODULES = ("config", "evaluation", "scheduling", "serving", "testing", "training")
# Instead of what the cell tagged `parameters` says: the same notebook, in less time.
SMALLER = {
    "02_train_and_calibrate": {
        "BLOCK_SIZE": 3,
        "TARGET_STEPS": 20,
        "DRAFTER_STEPS": 20,
        "NUM_TEXTS": 64,
        "NUM_PROMPTS": 16,
    }
}


def read(path):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


def set_parameters(notebook, values):
    """Replaces the cell tagged `parameters`; `values` must name what it names."""
    (cell,) = [
        cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())
    ]
    tree = ast.parse(cell.source)
    assert [node.targets[0].id for node in tree.body] == list(values)
    cell.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The kernel's sockets and loop are the notebook machinery's own affair.
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")
def test_runs(path, monkeypatch, tmp_path, quick_flags):
    nbclient = pytest.importorskip("nbclient")
    package = pathlib.Path(dspark_jax.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel takes its own
    notebook = read(path)
    if path.stem in SMALLER:
        set_parameters(notebook, SMALLER[path.stem])
        # What is left is mostly compilation.
        flags = f"{os.environ.get('XLA_FLAGS', '')} {quick_flags}"
        monkeypatch.setenv("XLA_FLAGS", flags)
    for measured in FOLDER.glob("*.json"):
        shutil.copy(measured, tmp_path)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=resources)
    client.execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 3
    # Progress may go to stderr, warnings may not.
    assert not [o.text for o in outputs if "Warning" in o.get("text", "")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_uses_public_names_and_holds_no_output(path):
    notebook = read(path)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None for c in cells)
    public = {*dspark_jax.__all__, *MODULES}
    for node in ast.walk(ast.parse("\n".join(cell.source for cell in cells))):
        if isinstance(node, ast.Import):
            modules = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {f"{node.module}.{alias.name}" for alias in node.names}
        else:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert node.value.id != "dspark_jax" or node.attr in public, node.attr
            continue
        for first, *rest in (module.split(".") for module in modules):
            assert first in {*FOREIGN, "dspark_jax"}, modules
            if first == "dspark_jax" and rest:
                assert rest[0] in public, modules
                assert not any(name.startswith("_") for name in rest), modules
