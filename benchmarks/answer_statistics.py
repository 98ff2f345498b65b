"""Statistics over the answers of several arms, with intervals; ratios are paired by cluster."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

from vllm_hicache.benchmarks.bench_report import shown, tier_shares
from vllm_hicache.benchmarks.bootstrap import (
    STATISTICS,
    Arrivals,
    Clusters,
    Estimate,
    intervals,
    paired_ratios,
    rate_interval,
    rate_ratio,
)
from vllm_hicache.benchmarks.run_record import table

Passes = dict[str, list[dict[str, Any]]]
GAP_DRAWS = 200
"""There are far more gaps than answers."""


def summarise(passes: Passes, cluster: str, seed: int) -> dict[str, Any]:
    """Arm -> its figures; ``cluster`` is the key of an answer that says what it belongs to.

    All passes of an arm are taken together. ``ratio`` is this arm over our own, so that above 1
    means that ours is quicker (for times) or slower (for ``output_tokens_per_s``).
    """
    samples = {arm: _Samples(results, cluster) for arm, results in passes.items()}
    ours = samples.get("hicache")
    found = {}
    for arm, mine in samples.items():
        figures = mine.figures(seed)
        if ours is not None and arm != "hicache":
            figures["ratio"] = mine.ratios(ours, seed)
        found[arm] = figures
    return found


class _Samples:
    """All answers of one arm."""

    def __init__(self, results: Sequence[dict[str, Any]], cluster: str) -> None:
        self._results = results
        self._answers = [answer for result in results for answer in result["answers"]]
        ttft: defaultdict[Hashable, list[float]] = defaultdict(list)
        gaps: defaultdict[Hashable, list[float]] = defaultdict(list)
        for answer in self._answers:
            ttft[answer[cluster]].append(answer["ttft_s"])
            gaps[answer[cluster]] += answer["gaps_s"]
        self.ttft = Clusters(ttft)
        self.gaps = Clusters(gaps) if any(gaps.values()) else None
        self.arrivals = self._all_arrivals()
        self.output_tokens = sum(1 + len(answer["gaps_s"]) for answer in self._answers)

    def figures(self, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = {"passes": len(self._results), "answers": len(self._answers)}
        for name, estimate in intervals(self.ttft, seed=seed).items():
            found[f"ttft_{name}_s"] = estimate.as_json()
        if self.gaps is not None:
            for name, estimate in intervals(self.gaps, seed=seed, draws=GAP_DRAWS).items():
                found[f"inter_token_{name}_s"] = estimate.as_json()
        prompt_tokens = sum(answer["prompt_tokens"] for answer in self._answers)
        cached: defaultdict[str, int] = defaultdict(int)
        for result in self._results:
            for source, tokens in result["cached"].items():
                cached[source] += tokens
        return {
            **found,
            "output_tokens_per_s": rate_interval(self.arrivals, seed=seed).as_json(),
            "wall_s": [result["wall_s"] for result in self._results],
            "prompt_tokens": prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": dict(cached),
            "shares": tier_shares(cached, prompt_tokens),
        }

    def _all_arrivals(self) -> Arrivals:
        ends, weights, passed_s = [], [], 0.0
        for result in self._results:
            for answer in result["answers"]:
                ends.append(passed_s + answer["end_s"])
                weights.append(1.0 + len(answer["gaps_s"]))
            passed_s += result["wall_s"]
        return Arrivals(ends, weights, passed_s)

    def ratios(self, ours: "_Samples", seed: int) -> dict[str, Any]:
        ratios = paired_ratios(self.ttft, ours.ttft, seed=seed)
        found = {f"ttft_{name}": ratio.as_json() for name, ratio in ratios.items()}
        rate = rate_ratio(self.arrivals, ours.arrivals, seed=seed)
        return {**found, "output_tokens_per_s": rate.as_json()}


def summary_tables(summary: dict[str, Any]) -> list[str]:
    """Times and rates by arm; shares by tier; each arm against ours."""
    times = []
    for arm, figures in summary.items():
        row = [arm]
        row += [_ms(figures, f"ttft_{name}_s") for name in STATISTICS]
        row += [_ms(figures, f"inter_token_{name}_s", 2) for name in ("mean", "p99")]
        row += [shown(Estimate(**figures["output_tokens_per_s"]))]
        row += [f"{sum(figures['wall_s']):,.1f}"]
        times.append(row)
    header = ["arm", *(f"TTFT {name} ms" for name in STATISTICS)]
    header += ["inter-token mean ms", "p99 ms", "output tokens/s", "wall s"]
    sources = sorted({s for figures in summary.values() for s in figures["shares"]})
    shares = [
        [arm, f"{figures['prompt_tokens']:,}"]
        + [f"{figures['shares'].get(source, 0.0):.1%}" for source in sources]
        for arm, figures in summary.items()
    ]
    tables = [table(header, times), table(["arm", "prompt tokens", *sources], shares)]
    against = [
        [
            arm,
            *(shown(Estimate(**figures["ratio"][f"ttft_{n}"]), digits=2) for n in ("mean", "p50")),
            shown(Estimate(**figures["ratio"]["output_tokens_per_s"]), digits=2),
        ]
        for arm, figures in summary.items()
        if "ratio" in figures
    ]
    if against:
        columns = ["over hicache", "TTFT mean", "TTFT p50", "output tokens/s"]
        tables.append(table(columns, against))
    return tables


def _ms(figures: dict[str, Any], name: str, digits: int = 1) -> str:
    return shown(Estimate(**figures[name]), 1e3, digits) if name in figures else "-"


def without_gaps(passes: Passes) -> Passes:
    """For the record: each answer with the mean of its gaps in their place."""
    return {
        arm: [{**result, "answers": [_short(a) for a in result["answers"]]} for result in results]
        for arm, results in passes.items()
    }


def _short(answer: dict[str, Any]) -> dict[str, Any]:
    gaps = answer["gaps_s"]
    rest = {key: value for key, value in answer.items() if key != "gaps_s"}
    return {**rest, "mean_gap_s": sum(gaps) / len(gaps) if gaps else None}
