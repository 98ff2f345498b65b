"""``hicache bench``: benchmarks of whole engines, of their peers, and of storage."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

BENCHMARKS = {
    "restore": "time to first token by prompt length and tier",
    "multiturn": "conversations that share system prompts, many at once",
    "trace": "a trace of requests, replayed",
    "interference": "what saving and restoring cost requests that decode",
    "storage": "a storage backend beside its raw client",
}


def add_parser(commands: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add one sub-command for each benchmark; what it takes is known when it runs."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine, and peers on it",
        description="Each benchmark prints a table and, with --out, writes JSON and a plot.",
        epilog="`hicache bench BENCHMARK --help` shows the options.",
    )
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name, text in BENCHMARKS.items():
        benchmark = benchmarks.add_parser(name, help=text, add_help=False, allow_abbrev=False)
        benchmark.set_defaults(run=run, benchmark=name, takes_engine_arguments=True)


def run(options: argparse.Namespace) -> int:
    """Run one benchmark with all arguments behind its name."""
    from vllm_hicache.benchmarks import command

    return command.run_benchmark(options.benchmark, options.engine_arguments)
