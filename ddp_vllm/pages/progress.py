"""The progress of a run: a bar, or a line every few steps if there is no terminal."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

BAR = 12  # characters
AROUND = 64  # characters of phase, bar, steps, times and the spaces between columns


class StepProgress:
    """Shows a run's steps; silent away from the main process."""

    def __init__(
        self, console: Console, num_steps: int, phase: Callable[[dict[str, float]], tuple[str, str]], shown: bool
    ) -> None:
        """phase: returns for a step's metrics the name of the phase and a text to show next to the
        speed."""
        self.console, self.num_steps, self.phase = console, num_steps, phase
        self.lines = not console.is_terminal and shown
        self.bar = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            BarColumn(BAR),
            TextColumn("{task.fields[text]}"),  # last: a narrow terminal shows its beginning only
            console=console,
            disable=not shown or not console.is_terminal,
        )

    def __enter__(self) -> Any:
        self.bar.start()
        self.task = self.bar.add_task("", total=self.num_steps, text="", start=False)
        self.began, self.first = 0.0, 0
        return self.report

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def report(self, metrics: dict[str, float]) -> None:
        """Show one step."""
        step = int(metrics["step"])
        phase, details = self.phase(metrics)
        divergence = f"kl {metrics['kl']:.3f} " if "kl" in metrics else ""
        text = f"loss {metrics['loss']:.3f} {divergence}{details}{metrics['tokens'] / metrics['seconds']:,.0f} tok/s"
        room = max(0, self.console.width - AROUND)
        self.bar.update(self.task, completed=step, description=phase, text=text[:room])
        if not self.first:  # the clock starts after the first step, which loads kernels
            self.first, self.began = step, time.perf_counter() - metrics["seconds"]
            self.bar.start_task(self.task)
        every = max(1, self.num_steps // 40)
        if self.lines and (step % every == 0 or step in (self.first, self.num_steps)):
            spent = time.perf_counter() - self.began
            left = spent / (step - self.first + 1) * (self.num_steps - step)
            self.console.print(
                f"{phase} {step}/{self.num_steps}, {left:.0f} s left: {text}", highlight=False, soft_wrap=True
            )
