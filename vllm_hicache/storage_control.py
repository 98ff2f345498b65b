"""Asks the storage processes of an engine what they serve, and changes it on all of them.

Runs outside the scheduler's thread, over connections of its own: an engine without requests does
not step, and one with many shall not wait.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vllm_hicache.config import StorageConfig
from vllm_hicache.masking import mask_url
from vllm_hicache.storage_address import StorageAddress
from vllm_hicache.storage_messages import (
    RECEIVE_BYTES,
    Ask,
    Configure,
    Configured,
    Reply,
    Standing,
    encode_frame,
    reply_reader,
)

ASK_TIMEOUT_S = 2.0
TRIAL_MARGIN_S = 5.0
"""Beyond the time to connect: importing a client takes a second on a busy machine."""
RETURN_S = 15.0
"""Beyond the grace time: how long a successor may take to come up."""
_POLL_S = 0.05

_T = TypeVar("_T")


class StorageControl:
    """What `hicache storage` does with the storage processes at ``addresses``, by worker id.

    A change reaches all workers or none, as far as they answer: first each opens the new storage on
    trial, then each is replaced by a process that serves it. Where one is lost in between, it stays
    on its old storage: what the workers find differs, which costs hits and nothing else, and the
    error says so.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = [StorageAddress.parse(address) for address in addresses]

    def status(self) -> list[Standing | str]:
        """What each worker's process serves, or why it does not say."""
        return self._all(self._ask)

    def attach(self, storage: StorageConfig) -> str:
        """Serve ``storage`` instead of what is served now. Returns what went wrong, or ""."""
        trial_s = storage.connect_timeout_s + TRIAL_MARGIN_S
        refusals = self._configure(storage, commit=False, timeout_s=trial_s)
        if refusals:
            return f"nothing was changed: {refusals}"
        return self._change(storage)

    def detach(self) -> str:
        """Serve no storage. Returns what went wrong, or ""."""
        return self._change(StorageConfig.detached())

    def _change(self, storage: StorageConfig) -> str:
        before = self._all(self._ask)
        grace_s = max(storage.shutdown_grace_s, StorageConfig.detached().shutdown_grace_s)
        refusals = self._configure(storage, commit=True, timeout_s=ASK_TIMEOUT_S)
        deadline = time.monotonic() + grace_s + RETURN_S
        waiting = self._not_changed(storage, before)
        while waiting and time.monotonic() < deadline and not refusals:
            time.sleep(_POLL_S)
            waiting = self._not_changed(storage, before)
        if not waiting:
            return ""
        reason = refusals or "their successors did not come up in time"
        return f"workers {waiting} did not change, the others did: {reason}; try again"

    def _not_changed(self, storage: StorageConfig, before: list[Standing | str]) -> list[int]:
        """Workers whose process is not a new one that serves this storage."""
        waiting = []
        for worker_id, now in enumerate(self._all(self._ask)):
            was = before[worker_id]
            is_new = isinstance(now, Standing) and (
                isinstance(was, str) or now.incarnation != was.incarnation
            )
            is_right = (
                isinstance(now, Standing)
                and now.url == mask_url(storage.url)
                and (now.is_open or not storage.is_attached)
            )
            if not (is_new and is_right):
                waiting.append(worker_id)
        return waiting

    def _configure(self, storage: StorageConfig, *, commit: bool, timeout_s: float) -> str:
        def ask(address: StorageAddress) -> str:
            question = Configure(address.token, storage, commit)
            reply = _exchange(address, question, timeout_s)
            return reply.refusal if isinstance(reply, Configured) else str(reply)

        told = self._all(ask)
        refused = [f"worker {i}: {refusal}" for i, refusal in enumerate(told) if refusal]
        return "; ".join(refused)

    def _ask(self, address: StorageAddress) -> Standing | str:
        reply = _exchange(address, Ask(address.token), ASK_TIMEOUT_S)
        return reply if isinstance(reply, Standing) else str(reply)

    def _all(self, ask: Callable[[StorageAddress], _T]) -> list[_T]:
        with ThreadPoolExecutor(len(self._addresses)) as threads:
            return list(threads.map(ask, self._addresses))


def _exchange(address: StorageAddress, question: Ask | Configure, timeout_s: float) -> Reply | str:
    """The reply of one storage process, or why there is none."""
    reader = reply_reader()
    deadline = time.monotonic() + timeout_s
    try:
        with address.open_socket() as connection:
            connection.settimeout(timeout_s)
            connection.connect(address.sockaddr)
            connection.sendall(encode_frame(question))
            while True:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                data = connection.recv(RECEIVE_BYTES)
                if not data:
                    return "its storage process closed the connection"
                for reply in reader.feed(data):
                    return reply
    except TimeoutError:
        return f"its storage process did not answer within {timeout_s:g} s"
    except OSError as error:
        return f"its storage process cannot be reached: {error.strerror or error}"
