"""The storage process of one worker: ``python -P -m vllm_hicache.storage_process``.

Its worker says in ``--config-fd`` what it serves; its end says in ``--status-fd`` how it went.
It lives until its lifeline ends, then finishes queued persists within the grace time. A hung
storage call never keeps it: it always leaves by ``os._exit``.
"""

import argparse
import asyncio
import logging
import mmap
import os
import signal
import socket
import sys
from typing import NoReturn

import msgspec

from vllm_hicache.errors import ConfigError
from vllm_hicache.host_pages import HostPages
from vllm_hicache.pool_mapping import PoolMapping
from vllm_hicache.storage_lifeline import leave, report_to
from vllm_hicache.storage_process_config import ENDINGS, EXIT_CONFIG, Launch
from vllm_hicache.storage_server import StorageServer
from vllm_hicache.storage_switch import ServedStorage, checked_storage

logger = logging.getLogger("vllm_hicache.storage_process")


def main() -> NoReturn:
    """Run the process that the options describe; never returns."""
    _ignore_signals()
    parser = argparse.ArgumentParser(prog="hicache-storage")
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--status-fd", type=int, required=True)
    options = parser.parse_args()
    report_to(options.status_fd)
    launch = _read_launch(options.config_fd)
    _set_up_logging(launch.config.worker_id)
    try:
        listener = socket.socket(fileno=launch.listen_fd)
        listener.setblocking(False)
        storage = checked_storage(launch.config.storage)
        asyncio.run(_serve(launch, listener, storage, _map_pool(launch)))
    except ConfigError as error:
        leave(EXIT_CONFIG, str(error))
    except Exception:
        logger.exception("The storage process failed")
    leave(1)


async def _serve(
    launch: Launch, listener: socket.socket, storage: ServedStorage, pages: HostPages
) -> NoReturn:
    await StorageServer(launch, listener, storage, pages).run()


def _ignore_signals() -> None:
    # They are blocked since this process was born, so none could end it before.
    for ending in ENDINGS:
        signal.signal(ending, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)


def _read_launch(config_fd: int) -> Launch:
    with open(config_fd, "rb") as file:
        file.seek(0)
        return msgspec.msgpack.decode(file.read(), type=Launch)


def _set_up_logging(worker_id: int) -> None:
    logging.raiseExceptions = False  # a closed stderr is no reason to stop
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,  # clients tell at every try where their credentials come from
        format=f"hicache-storage[worker {worker_id}] %(levelname)s %(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("vllm_hicache").setLevel(logging.INFO)


def _map_pool(launch: Launch) -> HostPages:
    config = launch.config
    needed = config.arena_bytes
    size = os.fstat(launch.pool_fd).st_size
    if size < needed:
        raise ConfigError(f"the host pool must have {needed} bytes or more, got {size}")
    memory = mmap.mmap(launch.pool_fd, needed)
    PoolMapping(launch.pool_fd, memory)
    return HostPages(memoryview(memory), config.num_slots, config.sections, config.all_parts)


if __name__ == "__main__":
    main()
