"""Plots of the benchmarks with many answers. Needs matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt

from vllm_hicache.benchmarks.run_record import describe

COLOURS = {"computed": "C3", "device": "C2", "host": "C0", "disk": "C1"}


def plot_answers(path: Path, record: dict[str, Any], key: str, label: str) -> None:
    """Distribution of TTFT, TTFT over ``key`` of an answer, and shares by tier."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    shown: set[str] = set()
    for arm, passes in record["results"].items():
        answers = [answer for result in passes for answer in result["answers"]]
        times = np.sort([answer["ttft_s"] * 1e3 for answer in answers])
        left.plot(times, np.arange(1, len(times) + 1) / len(times), label=arm)
        places = [answer[key] for answer in answers]
        middle.plot(places, [a["ttft_s"] * 1e3 for a in answers], ".", alpha=0.5, label=arm)
        bottom = 0.0
        shares = record["summary"][arm]["shares"]
        for source, share in sorted(shares.items()):
            name = None if source in shown else source
            colour = COLOURS.get(source, "C4")
            right.bar(arm, share, bottom=bottom, color=colour, label=name)
            shown.add(source)
            bottom += share
    left.set(xscale="log", xlabel="time to first token [ms]", ylabel="part of all answers")
    middle.set(yscale="log", xlabel=label, ylabel="time to first token [ms]")
    right.set(ylabel="part of all prompt tokens")
    for axes in (left, middle, right):
        axes.grid(visible=True, alpha=0.3)
        if record["results"]:
            axes.legend(fontsize="small", loc="best" if axes is not right else "lower right")
    figure.suptitle(describe(record), fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)
