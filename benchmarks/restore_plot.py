"""The plot beside the table of `restore.py`. Needs matplotlib."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

COLOURS = {"cold": "C3", "device hit": "C2", "host restore": "C0", "file restore": "C1"}
STYLES = {"hicache": "o-", "native": "s--", "simple": "^-.", "none": "x:"}


def plot_restore(path: Path, results: list[dict[str, Any]], title: str) -> None:
    """Two panels over the prompt length: time to first token, and restored bytes over it."""
    lines: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        lines[result["connector"], result["tier"]].append(result)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for (connector, tier), points in lines.items():
        lengths = [point["length"] for point in points]
        style = {"color": COLOURS[tier], "label": f"{tier} ({connector})"}
        times = [point["ttft_s"] * 1e3 for point in points]
        left.plot(lengths, times, STYLES[connector], **style)
        if tier in ("host restore", "file restore"):
            rates = [point["gb_per_s"] for point in points]
            right.plot(lengths, rates, STYLES[connector], **style)
    ticks = sorted({result["length"] for result in results})
    for axes, label in (
        (left, "time to first token [ms]"),
        (right, "restored bytes / TTFT [GB/s]"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.set_xlabel("prompt [tokens]")
        axes.set_ylabel(label)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    figure.suptitle(title, fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
