"""Rows of numbers in .npy files: mapped when read, appended to when written.

NumPy leaves room in a header for any number of rows, so that it never changes its size
while rows are added. Headers are checked before anything is mapped; no object arrays.
"""

import os
import pathlib
import tokenize
from typing import IO, Any

import numpy as np


def map_rows(
    path: pathlib.Path, num_rows: int, width: int, dtypes: tuple[Any, ...]
) -> np.ndarray:
    """The first `num_rows` rows of an array file, mapped read-only."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    with path.open("rb") as file:
        (shape, order, dtype), offset = read_header(path, file)
    names = " or ".join(np.dtype(d).name for d in dtypes)
    is_shaped = len(shape) == 2 and shape[0] >= num_rows and shape[1] == width
    if not is_shaped or order or dtype not in dtypes:
        raise ValueError(
            f"{path} must hold ({num_rows}, {width}) {names} by rows, got {shape} "
            f"{dtype}{' by columns' if order else ''}"
        )
    needed = offset + num_rows * width * dtype.itemsize
    if path.stat().st_size < needed:
        raise ValueError(
            f"{path} is truncated: {path.stat().st_size} bytes instead of {needed}"
        )
    return np.memmap(path, dtype, "r", offset, (num_rows, width))


def read_header(path: pathlib.Path, file: IO[bytes]) -> tuple[Any, int]:
    """(shape, is_fortran_order, dtype) of a .npy file, and where its data begin."""
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"format {version} instead of (1, 0)")
        return np.lib.format.read_array_header_1_0(file), file.tell()
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError(f"{path} is not a valid .npy file: {error}") from error


def write_header(file: IO[bytes], num_rows: int, width: int, dtype: np.dtype) -> None:
    """Writes the header of [num_rows, width] where the file stands."""
    about = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": (num_rows, width),
    }
    np.lib.format.write_array_header_1_0(file, about)


def sync(file: IO[bytes]) -> None:
    """Waits until everything written has reached the disk."""
    file.flush()
    os.fsync(file.fileno())
