"""Matplotlib without a display, and figures that appear complete."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

__all__ = ["plt", "save_figure"]


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG under a temporary name, then renames it."""
    temporary = path.with_name(path.name + ".partial")
    figure.savefig(temporary, format="png", dpi=150)
    plt.close(figure)
    temporary.replace(path)
