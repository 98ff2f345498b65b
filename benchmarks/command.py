"""The benchmarks behind ``hicache bench``; each is loaded when it is named."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_hicache.errors import ConfigError


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """Run one and return its exit status; wrong arguments end the process with status 2."""
    benchmark = importlib.import_module(f"vllm_hicache.benchmarks.{name}")
    options = parser_of(name).parse_args(arguments)
    options.arguments = list(arguments)
    try:
        return int(benchmark.run(options))
    except ConfigError as error:
        sys.stderr.write(f"hicache bench {name}: {error}\n")
        return 2


def parser_of(name: str) -> argparse.ArgumentParser:
    """Its options, with its module's docstring as the help."""
    benchmark = importlib.import_module(f"vllm_hicache.benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"hicache bench {name}",
        description=benchmark.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    benchmark.add_options(parser)
    return parser
