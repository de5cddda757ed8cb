"""Draws what `benchmarks.volume` has measured: tokens a second relative to plain vLLM, by workload and way.

    python -m benchmarks.volume_plot docs/figures/volume.json docs/figures/volume.svg

The first file has the cells of one or more runs, each with the `model` and whether it ran with `bulk` besides.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

#: The ways in the order of the bars, and their colours, which differ in lightness too.
WAYS = {"none": "#9aa5b1", "steered": "#7db3e8", "declared": "#1f5fbf", "block": "#e08a3c", "writing": "#9c4f12"}


def label(cell: dict[str, Any]) -> str:
    """The name of a cell's workload."""
    layers = "one layer" if cell["layers"] == 1 else f"{cell['layers']} layers"
    return f"{cell['model']}, {cell['requests']} requests\n{layers}" + (", --bulk" if cell["bulk"] else "")


def draw(cells: list[dict[str, Any]], to: Path) -> None:
    """Draw the cells to an SVG file."""
    import matplotlib as mpl

    mpl.use("svg")
    # The same bytes for the same figures.
    mpl.rcParams |= {"svg.hashsalt": "volume", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    from matplotlib import pyplot as plt

    workloads = list(dict.fromkeys(map(label, cells)))
    figure, axes = plt.subplots(figsize=(10, 3.6))
    width = 0.8 / len(WAYS)
    for place, (way, colour) in enumerate(WAYS.items()):
        found = {label(cell): cell["to_plain"] for cell in cells if cell["way"] == way}
        where = [number + (place - (len(WAYS) - 1) / 2) * width for number, one in enumerate(workloads) if one in found]
        heights = [found[one] for one in workloads if one in found]
        bars = axes.bar(where, heights, width, color=colour, label=way)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    axes.axhline(1, color="#555", linewidth=0.8, linestyle="--")
    axes.set(ylim=(0, 1.25), ylabel="tokens a second, to plain", xticks=range(len(workloads)))
    axes.set_xticklabels(workloads, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(WAYS), frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    figure.tight_layout()
    figure.savefig(to, format="svg", metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("to", type=Path)
    options = parser.parse_args()
    draw(json.loads(options.measured.read_text())["cells"], options.to)


if __name__ == "__main__":
    main()
