"""Configurations that a server refuses: it ends soon, says why once, and leaves nothing behind."""

import json
import os
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from live_server import OPTIONS, LiveServer, server_command, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]

REFUSAL_LIMIT_S = 60.0  # on idle cores
SECRET = "hunter2-is-no-password"
SLIDING_WINDOW = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 64,
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that is wrong, and what must be said of it."""

    says: str
    extra: dict[str, object] = field(default_factory=dict)
    transfer: dict[str, object] = field(default_factory=dict)
    model: dict[str, object] = field(default_factory=dict)
    """Changes of config.json; such a model has no weights, which nobody gets to use."""
    env: dict[str, str] = field(default_factory=dict)


REFUSALS = {
    "misspelt key": Refusal(
        'unknown option "page_sise"; did you mean "page_size"?', extra={"page_sise": 64}
    ),
    "sliding window": Refusal(
        'write_policy must be "write_through" or "write_through_selective" for this model, got',
        extra={"write_policy": "write_back"},
        model=SLIDING_WINDOW,
    ),
    "folder that cannot be made": Refusal(
        "storage folder /dev/null/store cannot be created: Not a directory",
        extra={"storage": "file:///dev/null/store"},
    ),
    "role": Refusal(
        "kv_role must be kv_both or kv_consumer, got 'kv_producer'",
        transfer={"kv_role": "kv_producer"},
    ),
    "failure policy": Refusal(
        "kv_load_failure_policy must be recompute, got 'fail'",
        transfer={"kv_load_failure_policy": "fail"},
    ),
    "page size": Refusal(
        "page_size 48 and vLLM's block size 32 must divide one another", extra={"page_size": 48}
    ),
    "too much memory": Refusal(
        "host_memory 900TiB asks for 900.00 TiB for each of 1 workers", {"host_memory": "900TiB"}
    ),
    "unknown scheme": Refusal(
        "storage scheme 'gopher' is unknown; known are",
        env={"HICACHE_STORAGE": f"gopher://me:{SECRET}@host/x"},
    ),
    "bad port": Refusal(
        "its host or port is not valid",
        env={"HICACHE_STORAGE": f"redis://me:{SECRET}@host:99999999/x"},
    ),
    "misspelt variable": Refusal(
        "unknown environment variable HICACHE_PAGE_SISE; did you mean HICACHE_PAGE_SIZE?",
        env={"HICACHE_PAGE_SISE": "64"},
    ),
}
PUSH = ("misspelt key",)


def _model(tiny_llama: Path, folder: Path, changes: dict[str, object]) -> tuple[Path, list[str]]:
    """The tiny Llama, or one that differs and only begins to load; and options for it."""
    if not changes:
        return tiny_llama, []
    model = folder / "model"
    shutil.copytree(tiny_llama, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text()) | changes
    (model / "config.json").write_text(json.dumps(config))
    return model, ["--load-format", "dummy"]


def _slowness() -> float:
    """How many processes share each core with the server."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            name, marks=() if name in PUSH else pytest.mark.full, id=name.replace(" ", "-")
        )
        for name in REFUSALS
    ],
)
def test_a_configuration_is_refused_soon_once_and_without_a_trace(case, tiny_llama, tmp_path):
    refusal = REFUSALS[case]
    model, options = _model(tiny_llama(), tmp_path, refusal.model)
    extra = {**OPTIONS, "storage": f"file://{tmp_path}/store", **refusal.extra}
    if "HICACHE_STORAGE" in refusal.env:
        del extra["storage"]
    command = server_command(model, extra, transfer=refusal.transfer, options=options)
    started = time.monotonic()
    server = LiveServer(command, tmp_path / "server.log", env=refusal.env)
    try:
        limit_s = REFUSAL_LIMIT_S * _slowness()
        while server.process.poll() is None:
            server.processes()  # remembers those that come and go
            assert time.monotonic() - started < limit_s, server.log()[-4000:]
            time.sleep(0.2)
        assert server.process.returncode not in (0, None)
        wait_until(lambda: not server.processes())
    finally:
        server.kill()
    _assert_said_once(server.log(), refusal.says)
    assert SECRET not in server.log()


def _assert_said_once(log: str, message: str) -> None:
    """In one record of vLLM's log. Python prints the traceback of an ended process once more."""
    lines = [line for line in log.splitlines() if message in line]
    records = [line for line in lines if re.match(r"\(\w+ pid=\d+\) ", line)]
    assert len(records) == 1, lines
    assert len(lines) <= 2, lines
    assert all("ConfigError: " in line for line in lines)
