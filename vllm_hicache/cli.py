"""The command ``hicache``: a table of commands, each in a file of its own.

A command module has ``add_parser(commands)``, which sets ``run``: a function from the parsed
options to an exit status. Nothing heavy is imported before a command runs.
"""

import argparse
import sys
from collections.abc import Sequence

from vllm_hicache import __version__, cli_bench, cli_doctor, cli_storage
from vllm_hicache.errors import ConfigError
from vllm_hicache.masking import mask_url

EXIT_OK = 0
EXIT_FAILED = 1
"""A check or an action failed."""
EXIT_USAGE = 2
"""Wrong options or configuration; argparse ends with the same status."""

COMMANDS = (cli_doctor, cli_storage, cli_bench)


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="hicache", description="Tools for vllm-hicache, the KV connector of vLLM."
    )
    parser.add_argument("--version", action="version", version=f"hicache {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    options.engine_arguments = rest
    if rest and not getattr(options, "takes_engine_arguments", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        status: int = options.run(options)
    except ConfigError as error:
        sys.stderr.write(f"hicache: {mask_url(str(error))}\n")
        return EXIT_USAGE
    return status


if __name__ == "__main__":
    sys.exit(main())
