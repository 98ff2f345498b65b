"""Inside the storage process: which storage it serves, and the change to another one.

A process serves one storage for its life. The change is a restart under another configuration, so
that what may still hang in calls to the old storage ends with the process.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn, Protocol

from vllm_hicache.config import StorageConfig
from vllm_hicache.errors import BackendError, BackendUnavailable, ConfigError
from vllm_hicache.masking import mask_url
from vllm_hicache.storage import FetchOutcome, KeepsRecords, ShardObject, WriteOutcome
from vllm_hicache.storage_lifeline import leave, report
from vllm_hicache.storage_messages import Ask, Configure, Configured, Reply, Standing
from vllm_hicache.storage_operations import VerifiedStorage
from vllm_hicache.storage_process_config import EXIT_SWITCHED, Launch, Report


class ServedStorage(VerifiedStorage, Protocol):
    """What the process needs of ``CheckedStorage`` beyond its operations."""

    @property
    def records(self) -> KeepsRecords | None: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def stats(self) -> Mapping[str, float]: ...

    def oldest_running_s(self) -> float: ...


class NoStorage:
    """Stands where no storage is attached; the operation table never calls it."""

    records = None

    async def open(self) -> None:
        raise BackendUnavailable("no storage is attached")

    async def close(self) -> None:
        """Nothing to close."""

    def stats(self) -> dict[str, float]:
        return {}

    def oldest_running_s(self) -> float:
        return 0.0

    async def exists(self, names: Sequence[str]) -> list[bool]:
        raise BackendUnavailable("no storage is attached")

    async def fetch(self, items: Sequence[ShardObject]) -> list[FetchOutcome]:
        raise BackendUnavailable("no storage is attached")

    async def persist(self, items: Sequence[ShardObject]) -> list[WriteOutcome]:
        raise BackendUnavailable("no storage is attached")


def checked_storage(config: StorageConfig) -> ServedStorage:
    """The storage that a configuration names, not opened yet; ``ConfigError`` if it cannot be."""
    if not config.is_attached:
        return NoStorage()
    from vllm_hicache.storage_backends.envelope import CheckedStorage
    from vllm_hicache.storage_backends.registry import open_backend

    key = config.integrity_key.encode() if config.integrity_key else None
    return CheckedStorage(open_backend(config.url, config), integrity_key=key)


async def try_storage(config: StorageConfig) -> str:
    """Why this storage cannot be served, "" if it can: it was opened, and closed again."""
    if not config.is_attached:
        return ""
    try:
        storage = checked_storage(config)
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                await storage.open()
        finally:
            await storage.close()
    except TimeoutError:
        return f"it did not answer within {config.connect_timeout_s:g} s"
    except (ConfigError, BackendError) as error:
        return mask_url(str(error))
    return ""


class Switch:
    """Answers who asks what this process serves, and who wants it to serve something else."""

    def __init__(
        self,
        launch: Launch,
        *,
        is_open: Callable[[], bool],
        counters: Callable[[], dict[str, float]],
        finish: Callable[[], Awaitable[None]],
    ) -> None:
        self._launch = launch
        self._is_open = is_open
        self._counters = counters
        self._finish = finish
        self._is_leaving = False

    async def answer(self, question: Ask | Configure) -> Reply:
        """The reply. After a committed ``Configured`` the caller calls ``leave`` here."""
        if isinstance(question, Ask):
            return self._standing()
        if self._is_leaving:
            return Configured("it is changing its storage already")
        if question.commit:
            self._is_leaving = True
            return Configured("")
        return Configured(await try_storage(question.storage))

    async def leave(self, storage: StorageConfig) -> NoReturn:
        """Finish what was accepted, within the grace time; a successor serves ``storage``."""
        report(Report(next_storage=storage))
        await self._finish()
        leave(EXIT_SWITCHED)

    def _standing(self) -> Standing:
        config, launch = self._launch.config, self._launch
        return Standing(
            worker_id=config.worker_id,
            incarnation=launch.incarnation,
            pid=os.getpid(),
            attachment=launch.attachment,
            url=mask_url(config.storage.url),
            is_open=self._is_open(),
            counters=self._counters(),
        )
