"""What a run says while it works."""

from dspark_jax.training.runs.progress import Progress

RECORD = {
    "step": 20,
    "tokens_per_second": 12345.6,
    "drafters": {
        "a": {"loss": 1.25, "tau_probabilistic": 2.5, "accept_rate": [0.75, 0.5]}
    },
}


def test_plain_lines(capsys):
    with Progress() as progress:
        progress.log("hello")
        progress.start(10, 100)
        progress.update(RECORD)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("s] hello")
    assert "step 20/100  a: loss 1.2500 τ~2.500 accept 0.750" in second
    assert "12,346 tokens/s  ETA 0:00:0" in second


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "140")
    with Progress() as progress:
        progress.start(10, 100)
        progress.update(RECORD)
        progress.log("[bold] stays as it is")
    shown = capsys.readouterr().err
    for part in ("20/100", "a: loss 1.2500", "12,346 tokens/s", "ETA"):
        assert part in shown
    assert "[bold] stays as it is" in shown
