"""What commands print."""

import rich.table

from dspark_jax.commands import terminal


def test_tables_are_whole_where_nobody_says_how_wide(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"column{i}" for i in range(12)]
    table = rich.table.Table(*names, title="runs/[a]/:smile:")
    table.add_row(*(f"{i}.2345678" for i in range(12)))
    sentence = "a sentence of more than forty columns, which stays one line"
    terminal.print_result(table, sentence)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "runs/[a]/:smile:"
    (header,) = (line for line in lines if "column0" in line)
    (row,) = (line for line in lines if "0.2345678" in line)
    assert all(name in header for name in names)
    assert all(f"{i}.2345678" in row for i in range(12))
    assert lines[-1] == sentence
