"""The engine's end of `hicache storage`: a thread that answers one command at a time.

A command is one line of JSON, the answer another. A wrong token is answered late and logged.
"""

import contextlib
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_hicache.config import HiCacheConfig, StorageConfig
from vllm_hicache.control_address import ControlAddress
from vllm_hicache.errors import ConfigError
from vllm_hicache.masking import mask_url
from vllm_hicache.storage_control import StorageControl
from vllm_hicache.storage_messages import Standing

logger = logging.getLogger(__name__)

MAX_COMMAND_BYTES = 64 << 10
RECEIVE_TIMEOUT_S = 5.0
WRONG_TOKEN_S = 1.0
"""A guess a second: a token of 16 characters is not found that way."""
CLOSE_S = 1.0


class ControlServer:
    """Listens at ``address`` for who shows ``token``, and passes commands to ``control``.

    Without a token every command is refused.
    """

    def __init__(self, address: ControlAddress, token: str | None, control: StorageControl) -> None:
        self._address = address
        self._token = token
        self._control = control
        self._closing = threading.Event()
        self._listener = address.listen()
        self._thread = threading.Thread(target=self._run, name="hicache-control", daemon=True)
        self._thread.start()
        logger.info("HiCache: storage can be attached and detached at %s", address)
        if token is None:
            logger.warning("HiCache: no control_token is set, so every command is refused")

    @classmethod
    def create(
        cls, config: HiCacheConfig, replica: int, storage_addresses: Sequence[str]
    ) -> "ControlServer | None":
        """Of one data-parallel replica; None where no address is configured."""
        if config.control_address is None:
            return None
        address = ControlAddress.parse(config.control_address).of_replica(replica)
        return cls(address, config.control_token, StorageControl(storage_addresses))

    def close(self) -> None:
        """Stop listening. A command that runs is not waited for longer than a moment."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._thread.join(CLOSE_S)
        self._address.remove()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closing.is_set():
                    logger.exception("HiCache: no more commands are taken at %s", self._address)
                return
            try:
                with connection:
                    self._serve(connection)
            except OSError as error:
                logger.warning("HiCache: a connection for control broke: %s", error)
            except Exception:
                logger.exception("HiCache: a command failed")

    def _serve(self, connection: socket.socket) -> None:
        try:
            command = _read_command(connection)
            self._check(str(command.pop("token", "")))
            answer = self._run_command(command)
        except ConfigError as error:
            answer = {"error": mask_url(str(error))}
        connection.sendall(json.dumps(answer).encode() + b"\n")

    def _check(self, token: str) -> None:
        if self._token is None:
            raise ConfigError("this engine was started without a control_token: set one")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            logger.warning("HiCache: a command with a wrong token was refused")
            self._closing.wait(WRONG_TOKEN_S)
            raise ConfigError("the token is not the control_token of this engine")

    def _run_command(self, command: Mapping[str, object]) -> dict[str, Any]:
        problem = ""
        match command.get("command"):
            case "status":
                pass
            case "attach":
                table = command.get("storage")
                if not isinstance(table, dict):
                    raise ConfigError("attach needs a table `storage` with a url")
                storage = StorageConfig.parse(table)
                problem = self._logged("attach", mask_url(storage.url), self._attach(storage))
            case "detach":
                problem = self._logged("detach", "storage", self._control.detach())
            case other:
                raise ConfigError(f"a command is status, attach or detach, got {other!r}")
        answer: dict[str, Any] = {"workers": [_described(s) for s in self._control.status()]}
        return answer | ({"error": problem} if problem else {})

    def _attach(self, storage: StorageConfig) -> str:
        return mask_url(self._control.attach(storage))

    def _logged(self, verb: str, what: str, problem: str) -> str:
        if problem:
            logger.warning("HiCache: %s %s failed: %s", verb, what, problem)
        else:
            logger.info("HiCache: %s %s: done on all workers", verb, what)
        return problem


def _described(standing: Standing | str) -> dict[str, Any]:
    if isinstance(standing, str):
        return {"error": standing}
    return {field: getattr(standing, field) for field in Standing.__struct_fields__}


def _read_command(connection: socket.socket) -> dict[str, Any]:
    deadline = time.monotonic() + RECEIVE_TIMEOUT_S
    data = b""
    while not data.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        piece = connection.recv(4096)
        data += piece
        if not piece or len(data) > MAX_COMMAND_BYTES:
            raise ConfigError("a command is one line of JSON")
    try:
        command = json.loads(data)
    except ValueError as error:
        raise ConfigError("a command is one line of JSON") from error
    if not isinstance(command, dict):
        raise ConfigError("a command is a JSON object")
    return command
