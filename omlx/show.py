"""What a person sees while something long goes on: one bar a model, on standard error."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from omlx.ids import ModelId


class LoadBars:
    """A context; `update` is a LoadProgress. Shows nothing until something is told."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "LoadBars":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the finished bars on the screen; later updates are not shown."""
        self._progress.stop()

    def update(self, model: ModelId, done: int, total: int) -> None:
        self.tell(f"loading {model}", done, total)

    def tell(self, what: str, done: int, total: int) -> None:
        """`what` names the bar; its first mention makes it."""
        if what not in self._tasks:
            self._progress.start()
            self._tasks[what] = self._progress.add_task(what, total=total)
        self._progress.update(self._tasks[what], completed=done, total=total)
