"""Plot of the storage benchmark. Needs matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from vllm_hicache.benchmarks.run_record import describe


def plot_storage(path: Path, record: dict[str, Any]) -> None:
    """Rates of all ways, writes and reads side by side."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    for axes, direction in zip(panels, ("write", "read"), strict=True):
        lines = [line for line in record["lines"] if line["direction"] == direction]
        names = [f"{line['way']}\n{line['object_kib']} KiB" for line in lines]
        axes.bar(range(len(lines)), [line["mib_per_s"] for line in lines])
        axes.set_xticks(range(len(lines)), names, rotation=30, ha="right", fontsize="small")
        axes.set(title=direction, ylabel="MiB/s")
        axes.grid(visible=True, axis="y", alpha=0.3)
    figure.suptitle(describe(record), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
