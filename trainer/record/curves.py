"""A figure of a run: ``curves.png``."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.common import packages
from trainer.errors import ConfigurationError
from trainer.record.charts import sections_of
from trainer.record.drawing import INK, plot
from trainer.record.run_record import RunRecord
from trainer.record.run_recorder import RecordView

if TYPE_CHECKING:  # takes a second to import, and is only needed at the end of a fit
    from matplotlib.figure import Figure


class Curves(RecordView):
    """Draw loss, metrics and loss scale over the optimizer steps into ``curves.png`` at the end of a fit.

    It is not a default callback, and requires matplotlib. The points come from the run's record instead of a logger, so
    the curves of a resumed run are complete. To plot several runs together, use ``trainer.load_run(folder)``. The
    panels are those of the report:

    - Loss: the loss that ``training_step`` returned, and the validation loss.
    - A panel for each metric of an epoch or a validation, such as ``acc`` for ``train_acc`` and ``val_acc``.
    - Loss scale: on a logarithmic axis, with the skipped steps marked; left out without loss scaling.

    Only rank zero draws. The training losses are those of rank zero.

    Args:
        dirpath: folder of ``curves.png``. Default: the folder of ``run.json``, else that of the first logger.
        max_points: maximum number of points per curve in the record. Default: 1024.

    Attributes:
        path: path of the last fit's figure. None if there is no figure.

    Raises:
        ValueError: if ``max_points`` is less than 2.
        ConfigurationError: if matplotlib is not installed.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, max_points: int = 1024) -> None:
        if max_points < 2:
            raise ValueError(f"max_points={max_points}: a curve needs at least 2.")
        if problem := packages.missing("plots"):
            raise ConfigurationError(f"The callback Curves needs {problem}")
        super().__init__(dirpath, max_points=max_points)
        self.path: Path | None = None

    def draw(self, record: RunRecord, folder: Path) -> dict[str, Path]:
        """Write ``curves.png``, and return its path by name. Return {} if there are no points."""
        self.path = None
        figure = figure_of(record)
        if figure is None:
            return {}
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "curves.png")
        self.path = folder / "curves.png"
        return {"curves": self.path}


def figure_of(record: RunRecord) -> "Figure | None":
    """Return the figure of a run, without a window and without ``pyplot``, or None if there are no points."""
    without_files = RunRecord(record.facts, None)
    sections = {section.title: section.charts for section in sections_of(without_files)}
    scale = [chart for chart in sections.get("Loss scale and gradients", ()) if chart.title == "Loss scale"]
    charts = [*sections.get("Learning", ()), *scale]
    if not charts:
        return None
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # at DEBUG it logs hundreds of lines about fonts
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 2.3 * len(charts)), dpi=150, facecolor="white", layout="constrained")
    figure.suptitle(f"{record.module}, {record.precision}", x=0.01, ha="left", weight="bold", color=INK)
    column = figure.subplots(len(charts), sharex=True, squeeze=False)[:, 0]
    end = max(line.curve.steps[-1] for chart in charts for line in chart.lines)
    for axes, chart in zip(column, charts, strict=True):
        axes.set_title(chart.title, loc="left", size=10, color=INK)
        plot(axes, chart, end)
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    column[-1].set_xlabel("optimizer step", color=INK)
    return figure
