"""What a run says while it works, on stderr: a bar on a terminal, else plain lines."""

import sys
import time
from types import TracebackType
from typing import Any

import rich.console
import rich.progress


class Progress:
    """Lines with the seconds since the start, and one bar; a context manager."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._total, self._first, self._first_time = 0, 0, 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def log(self, text: str) -> None:
        """Writes a line, above the bar if there is one."""
        line = f"[{self.seconds:7.1f} s] {text}"
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def start(self, step: int, total: int) -> None:
        """Begins at `step` of `total` steps."""
        self._total, self._first, self._first_time = total, step, time.monotonic()
        if not sys.stderr.isatty():
            return
        columns = rich.progress
        self._bar = rich.progress.Progress(
            columns.BarColumn(bar_width=20),
            columns.MofNCompleteColumn(),
            columns.TextColumn("{task.fields[about]}"),
            columns.TimeElapsedColumn(),
            columns.TextColumn("ETA"),
            columns.TimeRemainingColumn(elapsed_when_finished=True),
            console=rich.console.Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total, completed=step, about="")
        self._bar.start()

    def update(self, record: dict[str, Any]) -> None:
        """Shows a training record."""
        step = record["step"]
        about = brief(record["drafters"])
        speed = f"{record['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, about=f"{about}  {speed}")
            return
        spent = time.monotonic() - self._first_time
        left = spent * (self._total - step) / max(step - self._first, 1)
        self.log(f"step {step}/{self._total}  {about}  {speed}  ETA {_duration(left)}")


def brief(drafters: dict[str, Any]) -> str:
    """One line about every drafter: loss, τ estimate, acceptance of the first slot."""
    return " | ".join(
        f"{name}: loss {r['loss']:.4f} τ~{r['tau_probabilistic']:.3f} "
        f"accept {r['accept_rate'][0]:.3f}"
        for name, r in drafters.items()
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
