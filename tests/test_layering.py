"""The house's layers: a module imports from its own package and from lower rows only.

The design's order, by module where a package spans two rows: `interop` reads and writes
the parameters of drafters, and their loader stands above it.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

import dspark_jax
import pallas_kernels

ROWS = (  # lowest first
    ("pallas_kernels",),
    (
        "dspark_jax.config",
        "dspark_jax.types",
        "dspark_jax.checks",
        "dspark_jax.tensor_files",
    ),
    (
        "dspark_jax.noise",
        "dspark_jax.products",
        "dspark_jax.candidates",
        "dspark_jax.cuts",
    ),
    ("dspark_jax.layers", "dspark_jax.attention"),
    ("dspark_jax.sampling", "dspark_jax.kv_cache"),
    ("dspark_jax.paged_cache", "dspark_jax.draft_sampler"),
    ("dspark_jax.targets", "dspark_jax.drafters"),
    ("dspark_jax.interop",),
    ("dspark_jax.drafters.load",),
    ("dspark_jax.decoding", "dspark_jax.checkpoint"),
    ("dspark_jax.testing",),
    ("dspark_jax.serving", "dspark_jax.training", "dspark_jax.evaluation"),
    ("dspark_jax.commands",),
    ("dspark_jax.cli",),
)
NUMPY_ONLY = "dspark_jax.scheduling"  # beside the rows
PACKAGE = pathlib.Path(dspark_jax.__file__).parent
KERNELS = pathlib.Path(pallas_kernels.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def row_of(module):
    """(row, the entry of ROWS that holds `module`): the longest prefix wins."""
    entries = [(len(e), row, e) for row, es in enumerate(ROWS) for e in es]
    held = [entry for entry in entries if f"{module}.".startswith(f"{entry[2]}.")]
    return max(held)[1:] if held else None


def imports(path):
    """Every module that `path` imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


@pytest.mark.parametrize("module", [m for m in MODULES if m != "dspark_jax"])
def test_imports_from_below_only(module):
    found = {name for name in imports(MODULES[module]) if name.split(".")[0] != "jax"}
    if module.startswith(NUMPY_ONLY):
        foreign = {name.split(".")[0] for name in found} - set(sys.stdlib_module_names)
        assert foreign <= {"numpy", "dspark_jax"}
        assert all(
            n.startswith(NUMPY_ONLY) for n in found if n.startswith("dspark_jax")
        )
        return
    assert row_of(module) is not None, f"give {module} a place in ROWS"
    row, entry = row_of(module)
    for name in found:
        if row_of(name) is None or name.startswith(NUMPY_ONLY):
            is_top = entry == ROWS[-1][0]
            assert name != "dspark_jax" or is_top, "import the module, not the package"
            continue
        other_row, other_entry = row_of(name)
        assert other_row < row or other_entry == entry, f"{module} imports {name}"


@pytest.mark.parametrize(
    "path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.name)
)
def test_kernels_import_jax_only(path):
    found = {name.split(".")[0] for name in imports(path)}
    optional = {"jax_triton", "matplotlib", "torch", "triton"}
    foreign = found - set(sys.stdlib_module_names) - optional
    assert foreign <= {"jax", "numpy", "pallas_kernels"}


def test_kernels_load_without_extras():
    program = """
import sys
import pallas_kernels.bench
loaded = {"jax_triton", "matplotlib", "torch", "triton"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_inference_imports_no_training_packages():
    program = """
import sys
import dspark_jax
assert "jax" not in sys.modules, "importing the package must do no work"
for name in dspark_jax.__all__:
    getattr(dspark_jax, name)
heavy = {
    "grain", "huggingface_hub", "matplotlib", "optax", "orbax", "tensorstore"
}
loaded = heavy & {name.split(".")[0] for name in sys.modules}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
