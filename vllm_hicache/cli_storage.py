"""``hicache storage attach|detach|status``: the storage of an engine that runs."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_hicache.control_address import ControlAddress
from vllm_hicache.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

TOKEN_VARIABLE = "HICACHE_CONTROL_TOKEN"
ADDRESS_VARIABLE = "HICACHE_CONTROL_ADDRESS"
# The engine tries the storage, drains the old one and starts a process that serves the new one.
ANSWER_TIMEOUT_S = 180.0


def add_parser(commands: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's options."""
    parser = commands.add_parser(
        "storage", help="attach, detach or show the storage of a running engine"
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    attach = _action(actions, "attach", "serve this storage from now on, instead of any other")
    attach.add_argument("--url", required=True, help="storage URL, such as redis://cache:6379/0")
    attach.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the table `storage`, such as ttl_s=3600; may be repeated",
    )
    attach.add_argument(
        "--options",
        type=Path,
        metavar="FILE",
        help="YAML file with options of the table `storage`, where secrets are better kept",
    )
    _action(actions, "detach", "serve no storage; what is in host stays")
    _action(actions, "status", "what each worker serves")


def _action(
    actions: "_SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text)
    parser.set_defaults(run=run, action=name)
    parser.add_argument(
        "--server",
        metavar="ADDRESS",
        default=os.environ.get(ADDRESS_VARIABLE),
        help=f"control_address of the engine; by default ${ADDRESS_VARIABLE}",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"file that holds the control_token; by default it is ${TOKEN_VARIABLE}",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser


def run(options: argparse.Namespace) -> int:
    """Send one command and print the answer; 1 when it failed or a worker does not answer."""
    command: dict[str, Any] = {"command": options.action, "token": _token(options)}
    if options.action == "attach":
        command["storage"] = _storage_table(options)
    answer = ask(_address(options), command)
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        for i, worker in enumerate(answer.get("workers", ())):
            print(f"worker {i}: {_line(worker)}")
    if "error" in answer:
        sys.stderr.write(f"hicache: {answer['error']}\n")
    is_well = "error" not in answer and not any("error" in w for w in answer["workers"])
    return 0 if is_well else 1


def ask(address: ControlAddress, command: dict[str, Any]) -> dict[str, Any]:
    """The engine's answer to one command; ``ConfigError`` when it gives none."""
    try:
        with address.connect(ANSWER_TIMEOUT_S) as connection:
            connection.sendall(json.dumps(command).encode() + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                piece = connection.recv(65536)
                if not piece:
                    break
                data += piece
        answer: dict[str, Any] = json.loads(data)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no engine answers at {address}: {error}. It listens there only when it was started "
            "with control_address and control_token in kv_connector_extra_config"
        ) from error
    return answer


def _address(options: argparse.Namespace) -> ControlAddress:
    if not options.server:
        raise ConfigError(f"give --server ADDRESS or set {ADDRESS_VARIABLE}")
    try:
        return ControlAddress.parse(options.server)
    except ConfigError as error:
        hint = f" ({error})" if str(error) else ""
        raise ConfigError(
            f"--server must be unix:/PATH or tcp:127.0.0.1:PORT, got {options.server!r}{hint}"
        ) from error


def _token(options: argparse.Namespace) -> str:
    if options.token_file is not None:
        try:
            return str(options.token_file.read_text().strip())
        except OSError as error:
            raise ConfigError(f"--token-file {options.token_file}: {error.strerror}") from error
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"give --token-file FILE or set {TOKEN_VARIABLE}")
    return token


def _storage_table(options: argparse.Namespace) -> dict[str, object]:
    import yaml

    table: dict[str, object] = {}
    if options.options is not None:
        try:
            loaded = yaml.safe_load(options.options.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"--options {options.options}: {error}") from error
        if not isinstance(loaded, dict):
            raise ConfigError(f"--options {options.options}: a table of options is needed")
        table |= {str(key): value for key, value in loaded.items()}
    for pair in options.set:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes KEY=VALUE, got {pair!r}")
        table[key] = yaml.safe_load(value)
    return table | {"url": options.url}


def _line(worker: dict[str, Any]) -> str:
    if "error" in worker:
        return str(worker["error"])
    if not worker["url"]:
        return "no storage attached"
    counters = worker["counters"]
    state = "open" if worker["is_open"] else "cannot be reached now"
    breaker = "open" if counters.get("breaker_open") else "closed"
    return (
        f"{worker['url']} {state}, breaker {breaker}, "
        f"read {counters.get('bytes_read', 0):,.0f} B, "
        f"written {counters.get('bytes_written', 0):,.0f} B, "
        f"backlog {counters.get('write_backlog_bytes', 0):,.0f} B"
    )
