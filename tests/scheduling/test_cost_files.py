"""Cost tables on disk: the three forms, and every damage with its own message."""

import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from dspark_jax.scheduling import cost_files
from dspark_jax.scheduling.costs import Additive, Costs, Grid, Plane, TokenCurve

# As SGLang's profiler writes them.
FORM_A = {
    "sample_batch_tokens": [1, 8, 64],
    "sample_steps_per_sec": [100.0, 80.0, 25.0],
    "max_batch_tokens": 128,
}
FORM_B = {
    "bias_seconds": 0.01,
    "bs_probes": [1, 32],
    "alpha_seconds": [0.0, 0.002],
    "m_probes": [1, 256],
    "theta_seconds": [0.0, 0.03],
}
PLANE = {
    "requests": 1,
    "packed_tokens": [1, 8],
    "context_tokens": [0, 1024],
    "seconds": [[0.01, 0.011], [0.012, 0.014]],
}
FORM_C = {
    "form": "dspark_jax.costs",
    "version": 1,
    "info": {"device": "a test", "draft_length": 7},
    "drafting": {"planes": [PLANE, {**PLANE, "requests": 4}]},
    "plain": {**FORM_B, "context_seconds": 1e-7},
}


def save(tmp_path, values):
    path = tmp_path / "costs.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def test_form_a(tmp_path):
    found = cost_files.read(save(tmp_path, FORM_A))
    wanted = TokenCurve(
        packed_tokens=(1, 8, 64), step_seconds=(0.01, 0.0125, 0.04), max_tokens=128
    )
    assert found == Costs(drafting=wanted)
    other = tmp_path / "written.json"
    cost_files.write_curve(other, wanted, [1, 8, 64])
    written = json.loads(other.read_text())
    for key, value in {**FORM_A, "max_batch_tokens": 64}.items():
        assert written[key] == pytest.approx(value)
    assert cost_files.read(other).seconds(1, 30) == found.seconds(1, 30)


def test_form_b(tmp_path):
    found = cost_files.read(save(tmp_path, FORM_B))
    wanted = Additive(
        bias_seconds=0.01,
        requests=(1, 32),
        alpha_seconds=(0.0, 0.002),
        packed_tokens=(1, 256),
        theta_seconds=(0.0, 0.03),
    )
    assert found == Costs(drafting=wanted)
    other = tmp_path / "written.json"
    cost_files.write_additive(other, wanted)
    assert json.loads(other.read_text()) == FORM_B


def test_what_form_b_cannot_hold_goes_to_its_bias(tmp_path):
    costs = cost_files.read(save(tmp_path, FORM_C)).plain
    path = tmp_path / "written.json"
    cost_files.write_additive(path, costs, context_tokens=10_000)
    found = cost_files.read(path).seconds(8, [8, 64], 0)
    np.testing.assert_allclose(found, costs.seconds(8, [8, 64], 10_000))


def test_form_a_of_any_costs(tmp_path):
    costs = cost_files.read(save(tmp_path, FORM_C))
    path = tmp_path / "written.json"
    cost_files.write_curve(path, costs.drafting, (4, 8), requests=4, context_tokens=512)
    found = cost_files.read(path).seconds(1, [4, 6, 8])
    np.testing.assert_allclose(found, costs.seconds(4, [4, 6, 8], 512))


def test_form_c(tmp_path):
    found = cost_files.read(save(tmp_path, FORM_C))
    plane = Plane(
        requests=1,
        packed_tokens=(1, 8),
        context_tokens=(0, 1024),
        step_seconds=((0.01, 0.011), (0.012, 0.014)),
    )
    assert isinstance(found.drafting, Grid)
    assert found.drafting.planes[0] == plane
    assert found.drafting.planes[1].requests == 4
    assert found.plain.context_seconds == 1e-7
    assert found.info == FORM_C["info"]
    path = tmp_path / "written.json"
    cost_files.write(path, found)
    assert json.loads(path.read_text()) == FORM_C
    assert cost_files.read(path) == found
    least = Costs(drafting=cost_files.read(save(tmp_path, FORM_A)).drafting)
    cost_files.write(path, least)
    assert cost_files.read(path).seconds(1, 20) == pytest.approx(least.seconds(1, 20))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = save(tmp_path, FORM_C)
    costs = cost_files.read(path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        cost_files.write(
            path, Costs(drafting=costs.drafting, info={"seconds": float("inf")})
        )
    with pytest.raises(
        TypeError, match="a TokenCurve, an Additive or a Grid, got Costs"
    ):
        cost_files.write(path, Costs(drafting=costs))
    assert cost_files.read(path) == costs
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]


def but(values, /, **changes):
    return {**values, **changes}


def less(form, key):
    return {k: v for k, v in form.items() if k != key}


def planes(**changes):
    return but(FORM_C, drafting={"planes": [but(PLANE, **changes)]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", r"must have the key 'form', 'bias_seconds' or 'sample_batch_tokens'"),
        ('{"sample_batch_tokens": [NaN]}', "NaN is not a number"),
        (less(FORM_A, "max_batch_tokens"), "must hold the key 'max_batch_tokens'"),
        (but(FORM_A, more=1), "unknown key 'more'; known: "),
        (but(FORM_A, sample_batch_tokens=[]), "must have 1 to 4096 probes, got 0"),
        (but(FORM_A, sample_batch_tokens=[1, 1, 2]), "must be strictly increasing"),
        (but(FORM_A, sample_batch_tokens=[1, 2]), r"one value a probe, \(2,\)"),
        (but(FORM_A, sample_batch_tokens=[1, 2, 3.5]), "must hold integers"),
        (but(FORM_A, sample_batch_tokens=7), "'sample_batch_tokens' must be a list"),
        (but(FORM_A, sample_steps_per_sec=[1, 1, 0]), "must hold positive numbers"),
        (but(FORM_A, sample_steps_per_sec=[1, 1, "2"]), "must hold positive numbers"),
        (but(FORM_A, sample_steps_per_sec=[1, 1, True]), "must hold positive numbers"),
        ('{"sample_steps_per_sec": [1e999], "sample_batch_tokens": [1], '
         '"max_batch_tokens": 1}', "`step_seconds` must hold finite numbers, positive"),
        (but(FORM_A, max_batch_tokens=63), "at least the last probe, 64, got 63"),
        (but(FORM_A, max_batch_tokens="9"), "must be an integer of .*, got '9'"),
        (but(FORM_A, max_batch_tokens=10**400), "must be an integer of at most"),
        (but(FORM_A, sample_batch_tokens=[1, 8, 10**400]), r"and at most 2\*\*40, got"),
        (but(FORM_A, sample_steps_per_sec=[10**400, 1, 1]), "finite numbers, positive"),
        (but(FORM_A, sample_steps_per_sec=[1, 1, 1e-320]), "finite numbers, positive"),
        (but(FORM_B, bias_seconds=10**400), "must be positive and finite"),
        (but(FORM_B, bias_seconds=0), "`bias_seconds` must be positive and finite"),
        (but(FORM_B, bias_seconds="1"), "`bias_seconds` must be positive and finite"),
        (but(FORM_B, bias_seconds=True), "must be positive and finite"),
        (less(FORM_B, "m_probes"), "must hold the key 'm_probes'"),
        (but(FORM_B, context_seconds=0.0), "unknown key 'context_seconds'"),
        (but(FORM_B, theta_seconds=[0.0, -1.0]), "numbers, at least 0, got -1.0"),
        (but(FORM_B, theta_seconds=[0.0]), "must have one value a probe"),
        (but(FORM_B, bs_probes=[32, 1]), "`requests` must be strictly increasing"),
        (but(FORM_C, form="sps"), "'form' must be 'dspark_jax.costs', got 'sps'"),
        (but(FORM_C, version=2), "'version' must be 1, got 2"),
        (less(FORM_C, "version"), "must hold the key 'version'"),
        (less(FORM_C, "drafting"), "must hold the key 'drafting'"),
        (but(FORM_C, more=1), "unknown key 'more'"),
        (but(FORM_C, info=[]), r"'info' must be an object, got \[\]"),
        (but(FORM_C, drafting=[]), r"'drafting' must be an object"),
        (but(FORM_C, plain={}), "'plain' must have the key 'planes'"),
        (
            but(FORM_C, plain={**FORM_B, "context_seconds": -1}),
            "'plain': `context_seconds` must be finite and at least 0, got -1",
        ),
        (
            but(FORM_C, plain={**FORM_B, "context_seconds": "1"}),
            "`context_seconds` must be finite and at least 0, got '1'",
        ),
        (but(FORM_C, drafting={"planes": {}}), "must be a list of at most 256"),
        (but(FORM_C, drafting={"planes": [1]}), "'planes' must hold objects, got 1"),
        (but(FORM_C, drafting={"planes": [{}]}), "must hold the key 'requests'"),
        (but(FORM_C, drafting={"planes": []}), "must have 1 to 4096 probes, got 0"),
        (
            but(FORM_C, drafting={"planes": [PLANE, PLANE]}),
            "'drafting': `requests` must be strictly increasing",
        ),
        (planes(requests="1"), "`requests` must be an integer of at least 1, got '1'"),
        (planes(requests=True), "`requests` must be an integer of .* got True"),
        (planes(seconds=[1.0, 2.0]), "'seconds' must be a list, got 1.0"),
        (planes(seconds=[[1.0, 2.0]]), r"`step_seconds` must have one value a probe"),
        (planes(seconds=[[1.0], [2.0]]), r"one value a probe, \(2, 2\)"),
        (planes(context_tokens=[0, 0]), "`context_tokens` must be strictly increasing"),
        (planes(more=1), "'drafting': unknown key 'more'"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, values, message):
    path = save(tmp_path, values)
    with pytest.raises(ValueError, match=message) as caught:
        cost_files.read(path)
    assert str(path) in str(caught.value)


def test_a_missing_and_a_huge_file(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        cost_files.read(tmp_path / "none.json")
    monkeypatch.setattr(cost_files.json_files, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="has more than 100 bytes"):
        cost_files.read(save(tmp_path, FORM_C))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
values = st.recursive(
    scalars | st.sampled_from([1, 2.5, [1, 2], [0.5, 1.5], [[1.0, 2.0]]]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(list(PLANE) + list(FORM_B)), inner)
    ),
    max_leaves=6,
)


@hypothesis.settings(
    max_examples=500,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(st.sampled_from([FORM_A, FORM_B, FORM_C, PLANE]), st.data())
def test_a_damaged_file_is_an_error_of_its_own(tmp_path, form, data):
    """Any value in any place: a table that answers, or a ValueError."""
    key = data.draw(st.sampled_from(list(form)))
    broken = {**form, key: data.draw(values)}
    if form is PLANE:
        broken = {**FORM_C, "drafting": {"planes": [broken]}}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(broken))
    try:
        found = cost_files.read(path)
    except ValueError as error:
        found, message = None, str(error)
    if found is None:
        assert str(path) in message
        return
    seconds = found.seconds(3, [3, 10, 1000], 5000)
    assert np.all(np.isfinite(seconds))
    assert np.all(seconds > 0)
    assert found.plain_seconds(3, 100) > 0
