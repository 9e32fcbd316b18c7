"""What `dspark bench round` hands out of its JSON: rows for a figure, a table."""

from collections.abc import Iterator
from typing import Any

import rich.table

from dspark_jax.commands import terminal


def rows(result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every part that was timed, one after the other, each with its labels."""
    for point in result["points"]:
        for variant, found in point["variants"].items():
            for name, part in found["parts"].items():
                yield part | {
                    "part": name,
                    "variant": variant,
                    "batch": f"{point['batch']} x {point['context']}",
                }
    for cell in result["markov"]:
        for variant, part in cell["variants"].items():
            yield part | {"part": "markov", "variant": variant, "batch": cell["name"]}


def print_table(result: dict[str, Any]) -> None:
    """The result for a person."""
    ceiling = result["ceiling"]
    table = rich.table.Table(
        title=f"{result['target']}, {result['device']}, {result['dtype']}"
    )
    for name in ("batch", "variant", "part"):
        table.add_column(name)
    for name in ("ms", "least", "most", "floor", "fraction", "GB", "kernels"):
        table.add_column(name, justify="right")
    for row in rows(result):
        table.add_row(
            row["batch"],
            row["variant"],
            row["part"],
            *(f"{row[name]:.3f}" for name in ("ms", "least_ms", "most_ms")),
            f"{row['floor_ms']:.3f}",
            f"{row['fraction_of_floor']:.2f}",
            f"{row['bytes'] / 1e9:.2f}",
            "-" if row["num_kernels"] is None else str(row["num_kernels"]),
        )
    terminal.print_result(
        table,
        f"floor: {ceiling['copy_tb_per_s']} TB/s of copies, "
        f"{ceiling['matmul_tflops']} TFLOP/s of products, measured in this run",
    )
