"""``hicache doctor``: does this machine, this configuration and this storage fit together?"""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's options."""
    parser = commands.add_parser("doctor", help="check versions, memory, configuration, storage")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is found; 0 when all is well, 1 when a check failed."""
    from vllm_hicache import __version__

    print(f"vllm-hicache {__version__}")
    return 0
