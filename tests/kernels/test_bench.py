"""The benchmark's report, on the CPU and on tiny cases."""

import dataclasses
import json

import pytest

from pallas_kernels import bench, cases


def report(capsys, *argv):
    status = bench.main(argv)
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def _tiny(monkeypatch):
    found = {case.name: case for case in cases.BENCH}
    tiny = [
        dataclasses.replace(
            found["block 8x1024"], lengths=(64, 128), heads=4, kv_heads=2
        ),
        dataclasses.replace(
            found["verify paged 64x1024"],
            lengths=(70, 20),
            rows=(3, 1),
            heads=4,
            kv_heads=2,
        ),
    ]
    monkeypatch.setattr(cases, "BENCH", tuple(tiny))
    anchor = dataclasses.replace(
        cases.ANCHOR[0], length=32, anchors=8, slots=3, heads=4, kv_heads=2, width=16
    )
    monkeypatch.setattr(cases, "ANCHOR", (anchor,))


@pytest.mark.usefixtures("_tiny")
def test_times_cases_and_peers(capsys, tmp_path):
    out = tmp_path / "report.json"
    status, found = report(
        capsys, "--repetitions", "2", "--peers", "torch_flash", "--out", str(out)
    )
    assert status == 0
    assert json.loads(out.read_text()) == found
    assert {"device", "date", "versions", "ceiling", "results"} <= set(found)
    ours = [row for row in found["results"] if row["implementation"] == "xla"]
    assert [row["case"] for row in ours] == ["block 8x1024", "verify paged 64x1024"]
    for row in ours:
        assert 0 < row["least_us"] <= row["median_us"] <= row["most_us"]
        assert row["fraction"] > 0
        assert row["relative_error"] == 0
    assert ours[0]["bytes"] == 2 * (64 + 128) * 2 * 128 * 2
    assert ours[0]["flops"] == 4 * (64 + 128) * 7 * 4 * 128
    assert all("refused" in row for row in found["results"] if row not in ours)


@pytest.mark.usefixtures("_tiny")
def test_times_anchor_attention(capsys):
    status, found = report(
        capsys, "--op", "anchor", "--repetitions", "2", "--config", "anchors=2"
    )
    assert status == 0
    assert [row["config"]["anchors"] for row in found["results"]] == [2]
    assert all(row["median_us"] > 0 < row["forward_us"] for row in found["results"])


def test_checks_cases(capsys):
    status, found = report(capsys, "--check", "--cases", "window edge")
    assert status == 0
    assert [row["is_wrong"] for row in found["results"]] == [False]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--implementations", "cuda"), "--implementations: must be of mosaic_gpu"),
        (("--peers", "jax"), "--peers: must be of cudnn"),
        (
            ("--op", "anchor", "--config", "stages=2"),
            "--config: anchor_attention has anchors, skips_context, got stages",
        ),
    ],
)
def test_refuses(argv, message):
    with pytest.raises(SystemExit, match=message):
        bench.main(argv)


def test_time_is_limited(capsys):
    status, found = report(capsys, "--check", "--limit-seconds", "0")
    assert (status, found["results"]) == (0, [])
