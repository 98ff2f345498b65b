"""The arms of a comparison: which connector each engine has, and whether it can run here."""

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from vllm_hicache.errors import ConfigError

ARMS = ("hicache", "hicache+file", "native", "simple", "lmcache", "none")
FILE_ARM = "hicache+file"
CONNECTORS = {
    "hicache": "HiCacheConnector",
    "hicache+file": "HiCacheConnector",
    "native": "OffloadingConnector",
    "simple": "SimpleCPUOffloadConnector",
    "lmcache": "LMCacheMPConnector",
    "none": "",
}
LABELS = {
    "hicache": "vllm-hicache",
    "hicache+file": "vllm-hicache with files",
    "native": "vLLM's OffloadingConnector",
    "simple": "vLLM's SimpleCPUOffloadConnector",
    "lmcache": "LMCache in server mode",
    "none": "vLLM without a connector",
}
_ADAPTER = (
    "import lmcache, torch, vllm, vllm_hicache.benchmarks, "
    "lmcache.integration.vllm.vllm_multi_process_adapter"
)
_COMPILED = f"{_ADAPTER}, lmcache.cuda_ops"
"""Without the last one, LMCache falls back to slow copies."""
_PROBE_S = 120


@dataclass(frozen=True, slots=True)
class ConnectorSizes:
    """What every arm is given alike."""

    host_bytes: int
    page_size: int | None
    """Of ours; None: what the connector chooses."""
    storage: Path | None
    """Folder for pages; only of our connector."""
    storage_bytes: int = 0
    more_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arm -> further options of its connector."""
    lmcache_address: str = ""


def parse_arms(text: str) -> tuple[str, ...]:
    """Names with commas; ``ConfigError`` for others or for one that is named twice."""
    arms = tuple(name for name in text.split(",") if name)
    unknown = [name for name in arms if name not in ARMS]
    if unknown or len(set(arms)) < len(arms) or not arms:
        raise ConfigError(f"one or several of {','.join(ARMS)}, each once, got {text!r}")
    return arms


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA device, without loading CUDA."""
    return Path("/dev/nvidiactl").exists()


def why_not(arm: str, interpreter: str = sys.executable) -> str:
    """Why an arm cannot run here; empty where it can."""
    if arm in ("native", "simple") and not has_gpu():
        return "it copies with CUDA or XPU only, and there is no such device"
    if arm == "lmcache":
        return _why_no_lmcache(interpreter)
    return ""


def _why_no_lmcache(interpreter: str) -> str:
    if interpreter == sys.executable and importlib.util.find_spec("lmcache") is None:
        return "it is not installed (--lmcache-python names an interpreter that has it)"
    # There is no compiled extension for a CPU.
    probe = _COMPILED if has_gpu() else _ADAPTER
    try:
        run = subprocess.run(
            [interpreter, "-P", "-c", probe],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PROBE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it cannot be tried: {error}"
    if run.returncode:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return f"it or its compiled extension does not load: {last}"
    return ""


def connector_options(arm: str, sizes: ConnectorSizes) -> dict[str, Any]:
    """``kv_connector_extra_config`` of an arm: the same host bytes for all that take any."""
    options: dict[str, Any] = {}
    if CONNECTORS[arm] == CONNECTORS["hicache"]:
        options = _hicache(sizes)
    elif arm in ("native", "simple"):
        options = {"cpu_bytes_to_use": sizes.host_bytes}
    elif arm == "lmcache":
        options = _lmcache(sizes.lmcache_address)
    more = {**sizes.more_options.get(arm.partition("+")[0], {}), **sizes.more_options.get(arm, {})}
    return {**options, **more}


def _hicache(sizes: ConnectorSizes) -> dict[str, Any]:
    options: dict[str, Any] = {"host_memory": sizes.host_bytes}
    if sizes.page_size is not None:
        options["page_size"] = sizes.page_size
    if sizes.storage is None:
        return options
    return {
        **options,
        "weights_id": f"benchmark-{token_hex(8)}",  # no pages of an earlier run
        "fixed_weights": True,  # host memory can then be dropped without losing the files
        "min_object_bytes": 1,
        "storage": {
            "url": f"file://{sizes.storage.resolve()}",
            "capacity": sizes.storage_bytes,
            "min_free": 0,
            # Writes fall behind a fast device for a while; nothing is to be left out for it.
            "write_backlog": max(1 << 30, sizes.host_bytes // 2),
            "operation_timeout_s": 120,
        },
    }


def _lmcache(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {
        "lmcache.mp.host": f"tcp://{host}",
        "lmcache.mp.port": int(port),
        "lmcache.mp.save_decode_cache": True,  # as the others do
    }


def parse_more_options(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``ARM={JSON}`` several times -> arm -> options."""
    found: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        arm, equals, text = pair.partition("=")
        try:
            table = json.loads(text) if equals else None
        except ValueError as error:
            raise ConfigError(f"--arm-options {pair}: not valid JSON: {error}") from None
        if arm not in ARMS or not isinstance(table, dict):
            raise ConfigError(f"--arm-options takes ARM={{JSON object}}, got {pair!r}")
        found[arm] = {**found.get(arm, {}), **table}
    return found
