"""Plot of the interference benchmark. Needs matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt

from vllm_hicache.benchmarks.run_record import describe


def plot_waves(path: Path, record: dict[str, Any]) -> None:
    """Median and p99 of the gaps between tokens over the concurrency, a line for each arm."""
    figure, panels = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axes, name in zip(panels, ("p50", "p99"), strict=True):
        for arm, load in sorted({(line["arm"], line["load"]) for line in record["summary"]}):
            lines = [x for x in record["summary"] if (x["arm"], x["load"]) == (arm, load)]
            places = [line["concurrency"] for line in lines]
            times = [line[f"inter_token_{name}_s"] * 1e3 for line in lines]
            axes.plot(places, times, "o-", label=f"{arm}, {load}")
        axes.set(xlabel="requests that decode", ylabel=f"gap between tokens, {name} [ms]")
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(describe(record), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
