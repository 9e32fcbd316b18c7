"""Options and checks that the commands which measure share; no JAX."""

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from dspark_jax import config
from dspark_jax.commands import failure
from dspark_jax.targets import DEFAULT_TARGET

SHIPPED_DRAFTER = "dspark-smollm2-135m"
MAX_SEED = 2**32


def add_models(parser: argparse.ArgumentParser) -> None:
    """The options that choose target, precision and economies of the drafter."""
    add = parser.add_argument_group("models").add_argument
    add(
        "--target",
        default=DEFAULT_TARGET,
        help="smollm2-135m, a Hugging Face folder, a .gguf file or a hub name org/name",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and products (default %(default)s)",
    )
    add(
        "--draft-vocabulary",
        type=int,
        metavar="N",
        help="draft among the N most frequent tokens (default: all)",
    )
    add("--candidates", type=int, metavar="N", help="draft among N tokens a position")
    add(
        "--attention",
        choices=config.ATTENTIONS,
        default="auto",
        help="over the caches: xla, a kernel, or auto: xla unless one was faster",
    )


def add_drafter(parser: argparse.ArgumentParser) -> None:
    """The option that names one drafter with a confidence head."""
    parser.add_argument(
        "--drafter",
        metavar="D",
        help="dspark-smollm2-135m, or a folder in DeepSpec's layout (default: the "
        "shipped one for the default target)",
    )


def add_rule(add: Callable[..., Any]) -> None:
    """The option of the rule of verification, one of them."""
    add(
        "--rule",
        choices=config.RULES,
        default=config.Speculation().rule,
        help="of verification (default %(default)s)",
    )


def add_draft_length(add: Callable[..., Any]) -> None:
    """The option of the draft length, one of them."""
    add(
        "--draft-length",
        type=int,
        metavar="K",
        help="default: the drafter's block size",
    )


def add_output(parser: argparse.ArgumentParser, output: str, plot: str) -> None:
    """Where a JSON file and a figure go, and what the screen shows.

    Args:
      output, plot: help for the two files.
    """
    add = parser.add_argument_group("output").add_argument
    add("--output", metavar="FILE", help=output)
    add("--plot", metavar="PNG", help=plot)
    add("--json", action="store_true", help="print one JSON object instead of a table")


def add_decoding(parser: argparse.ArgumentParser, max_new_tokens: int) -> Any:
    """The options of the loop; returns the group's add_argument."""
    add = parser.add_argument_group("decoding").add_argument
    add(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        metavar="N",
        help="of every answer (default %(default)s)",
    )
    add(
        "--batch",
        type=int,
        default=16,
        metavar="B",
        help="prompts that run together (default %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    return add


def check(arguments: argparse.Namespace, rules: dict[str, tuple]) -> None:
    """Raises Failure unless every option obeys its rule; a list: each of its values.

    Args:
      rules: name -> (predicate, the rule in words).
    """
    for name, (is_valid, rule) in rules.items():
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not is_valid(value):
                raise failure.Failure(f"{option(name)} must be {rule}, got {value}")
    check_attention("--attention", getattr(arguments, "attention", "auto"))


def check_attention(label: str, attention: str) -> None:
    """Raises Failure if this is not the kernel's platform."""
    if attention in KERNEL_PLATFORMS:
        import jax

        needed, here = KERNEL_PLATFORMS[attention], jax.default_backend()
        if here != needed:
            raise failure.Failure(
                f"{label} {attention} needs a {needed}, this is {here}"
            )


def at_least(low: int) -> tuple[Callable[[Any], bool], str]:
    """A rule of `check`."""
    return (lambda value: value >= low), f"at least {low}"


KERNEL_PLATFORMS = {"mosaic_gpu": "gpu", "triton": "gpu", "mosaic_tpu": "tpu"}
COMMON_RULES: dict[str, tuple] = {
    "draft_vocabulary": at_least(1),
    "candidates": at_least(1),
    "draft_length": at_least(1),
    "max_new_tokens": at_least(2),
    "batch": at_least(1),
    "seed": (lambda value: 0 <= value < MAX_SEED, "in 0..2^32-1"),
    "temperature": (lambda value: 0 <= value < float("inf"), "a number >= 0"),
}


def check_exists(arguments: argparse.Namespace, *names: str) -> None:
    """Raises Failure for a path that leads nowhere."""
    for name in names:
        given = getattr(arguments, name)
        for value in given if isinstance(given, list) else [given]:
            if value is None:
                continue
            path = value.partition("=")[2] if name == "drafter" else ""
            path = path or value
            is_path = (
                name in ("prompts", "corpus", "sts")
                or path.startswith((".", "/", "~"))
                or path.endswith(".gguf")
                or path.count("/") > 1  # a hub name has one
            )
            if is_path and not pathlib.Path(path).exists():
                raise failure.Failure(f"{option(name)}: no such file or folder: {path}")


def check_parent(name: str, path: str | None) -> None:
    """Raises Failure unless the folder of the file `path` exists."""
    if path is not None and not pathlib.Path(path).absolute().parent.is_dir():
        raise failure.Failure(
            f"{option(name)}: no such folder: {pathlib.Path(path).parent}"
        )


def default_drafter(target: str, command: str) -> str:
    """The shipped drafter, if it fits the target."""
    if target != DEFAULT_TARGET:
        raise failure.Failure(
            f"--drafter: name one for this target (the shipped one is for "
            f"{DEFAULT_TARGET}); dspark {command} --help"
        )
    return SHIPPED_DRAFTER


def option(name: str) -> str:
    """How an argument is spelt on the command line."""
    return "--" + name.replace("_", "-")
