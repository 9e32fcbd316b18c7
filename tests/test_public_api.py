"""The public names and signatures, as `public_api.txt` holds them.

A change is a decision: `python tests/test_public_api.py > tests/public_api.txt`, and a
line in CHANGELOG.md.
"""

import dataclasses
import inspect
import pathlib

import dspark_jax

SNAPSHOT = pathlib.Path(__file__).with_name("public_api.txt")
MODULES = (
    "evaluation",
    "serving",
    "testing",
    "training",
)  # with their own public functions


def describe():
    """One line a name: functions by signature, classes by their fields."""
    for name in sorted(dspark_jax.__all__):
        value = getattr(dspark_jax, name)
        if name not in MODULES:
            yield describe_one(name, value)
            continue
        for inner, function in sorted(vars(value).items()):
            home = getattr(function, "__module__", None) or ""
            is_ours = f"{home}.".startswith(f"{value.__name__}.")
            is_named = inner in getattr(value, "__all__", ())
            if is_named or (
                inspect.isfunction(function) and is_ours and inner[0] != "_"
            ):
                yield describe_one(f"{name}.{inner}", function)


def describe_one(name, value):
    if inspect.isfunction(value):
        return f"def {name}{signature(value)}"
    if dataclasses.is_dataclass(value):
        return f"class {name}({', '.join(f.name for f in dataclasses.fields(value))})"
    if inspect.isclass(value):
        members = getattr(value, "_fields", None)
        if members is None:  # a class with methods
            members = [member for member in vars(value) if member[0] != "_"]
        return f"class {name}({', '.join(members)})"
    return f"{name} = {value!r}"


def signature(function):
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
    ]
    return found.replace(
        parameters=parameters, return_annotation=inspect.Signature.empty
    )


def test_public_names_and_signatures():
    assert list(describe()) == SNAPSHOT.read_text().splitlines()


def test_public_functions_have_docstrings():
    for name in dspark_jax.__all__:
        value = getattr(dspark_jax, name)
        assert name.isupper() or inspect.getdoc(value), name


def test_names_resolve_for_type_checkers_and_at_run_time_alike():
    homes = {name for names in dspark_jax._HOMES.values() for name in names}
    assert homes | set(MODULES) == set(dspark_jax.__all__)
    assert set(dspark_jax.__all__) <= set(dir(dspark_jax))


if __name__ == "__main__":
    print("\n".join(describe()))  # noqa: T201
