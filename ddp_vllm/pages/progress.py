"""The progress of a run: a bar, or a line every few steps if there is no terminal."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class StepProgress:
    """Shows a run's steps; silent away from the main process."""

    def __init__(
        self, console: Console, num_steps: int, phase: Callable[[dict[str, float]], tuple[str, str]], shown: bool
    ) -> None:
        """phase: returns for a step's metrics the name of the phase and a text to show next to the speed."""
        self.console, self.num_steps, self.phase = console, num_steps, phase
        self.lines = not console.is_terminal and shown
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not shown or not console.is_terminal,
        )

    def __enter__(self) -> Any:
        self.bar.start()
        self.task = self.bar.add_task("", total=self.num_steps, text="")
        self.began, self.first = time.perf_counter(), 0
        return self.report

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def report(self, metrics: dict[str, float]) -> None:
        """Show one step."""
        step = int(metrics["step"])
        phase, details = self.phase(metrics)
        divergence = f"kl {metrics['kl']:.3f} " if "kl" in metrics else ""
        text = f"loss {metrics['loss']:.3f} {divergence}{details}{metrics['tokens'] / metrics['seconds']:,.0f} tok/s"
        self.bar.update(self.task, completed=step, description=phase, text=text)
        self.first = self.first or step
        every = max(1, self.num_steps // 40)
        if self.lines and (step % every == 0 or step == self.num_steps):
            spent = time.perf_counter() - self.began
            left = spent / (step - self.first + 1) * (self.num_steps - step)
            self.console.print(
                f"{phase} {step}/{self.num_steps} {text}, {left:.0f} s left", highlight=False, soft_wrap=True
            )
