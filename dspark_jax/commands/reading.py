"""Reads a target's files in the background, while JAX is still being imported.

Importing JAX takes almost a second of Python, dequantising the default target about as
long outside of Python: side by side they cost one of the two.
"""

import concurrent.futures
from typing import NamedTuple

from dspark_jax.commands import failure
from dspark_jax.targets import fetch, files, gguf
from dspark_jax.targets import tokenizer as tokenizer_lib


class Reading(NamedTuple):
    """What is being read; `result()` raises what the reader raised."""

    target: concurrent.futures.Future[files.HostTarget]
    tokenizer: concurrent.futures.Future[tokenizer_lib.Tokenizer]


def begin(source: str) -> Reading:
    """Begins to read the target `source`, fetched first if need be, in float32.

    Raises:
      Failure: no such source, or it could not be fetched.
    """
    with failure.of_target():
        path = fetch.locate(source)
        file = None if path.is_dir() else gguf.read(path)
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=2)
    if file is None:
        target = pool.submit(files.read, path, "float32")
        tokenizer = pool.submit(tokenizer_lib.load_tokenizer, path)
    else:
        target = pool.submit(files.read_gguf, file, "float32")
        tokenizer = pool.submit(tokenizer_lib.from_gguf, file)
    pool.shutdown(wait=False)  # It ends with its two tasks.
    return Reading(target, tokenizer)
