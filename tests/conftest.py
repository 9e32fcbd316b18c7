"""Strict switches for every test: dtype and rank promotion, eight devices, fixed seeds.

Everything here is set before the first array exists.
"""

import atexit
import json
import os
import pathlib
import shutil
import tempfile

# Two workers share one card: neither may reserve most of it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# One cache of compiled programs for all workers and the commands that tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
    atexit.register(
        shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True
    )
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import hypothesis
import jax
import numpy as np
import pytest
import tokenizers

import dspark_jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # changes nothing on a GPU

# The same examples in every run; compilation makes the first one slow.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    if all(item.get_closest_marker("gpu") is None for item in items):
        return
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A stretch of the files for each worker, and stealing at the end.

    One file's programs and fixtures are then made by one worker only.
    """
    if config.getvalue("dist") != "load":  # what `-n` alone says
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


# Together a fifth of XLA's usual time: the older emitters of fused loops are what helps
# most beside no optimisation.
QUICK_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@pytest.fixture(scope="session")
def quick_options() -> dict:
    """Those of QUICK_OPTIONS that this XLA has: they come and go with its releases."""
    program, found = jax.jit(lambda: 0).lower(), {}
    for name, value in QUICK_OPTIONS.items():
        try:
            program.compile(compiler_options={name: value})
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
        else:
            found[name] = value
    return found


@pytest.fixture(scope="session")
def quick_flags(quick_options) -> str:
    """The same for a process of its own: what to add to its XLA_FLAGS."""
    return " ".join(
        f"--{name}={str(value).lower()}" for name, value in quick_options.items()
    )


@pytest.fixture(scope="module")
def quick_compilation(quick_options):
    """For modules that compile more than they run, and compare with a tolerance.

    Programs of other modules are compiled as users' are: JAX's own caches do not know
    of the options, and are emptied.
    """
    if jax.default_backend() == "gpu":  # kernels are compiled there as for users
        yield
        return
    from jax._src import compiler  # no public setting reaches every jit

    get_options = compiler.get_compile_options

    def get_quick_options(*arguments, env_options_overrides=None, **more):
        overrides = {**quick_options, **(env_options_overrides or {})}
        return get_options(*arguments, env_options_overrides=overrides, **more)

    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", get_quick_options)
        yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _fixed_numpy_seed():
    np.random.seed(0)  # noqa: NPY002 (for libraries that draw from the global one)


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """The folder of golden vectors; its README says what is in it."""
    return pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def root() -> pathlib.Path:
    """The folder that holds tests/: the checkout, or a copy elsewhere."""
    return pathlib.Path(__file__).parent.parent


@pytest.fixture
def package_environment() -> dict[str, str]:
    """For a process of its own that must import the package that is tested here."""
    package = pathlib.Path(dspark_jax.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": str(package)}


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory, golden) -> pathlib.Path:
    """The golden Qwen3 with a byte tokenizer and a chat template of its own."""
    folder = tmp_path_factory.mktemp("target")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(golden / "targets" / "qwen3_untied" / name, folder)
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    printable = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ", "Ċ"]  # space, newline
    others = sorted(set(byte_level.alphabet()) - set(printable))
    vocab = {token: i for i, token in enumerate(printable + others[:30])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = byte_level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    assert backend.get_vocab_size() == 128
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}"
    )
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
