"""One fault of the storage under load: control, healthy, injected, healed, hits again."""

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median

from live_server import PAGE, UNIPROC, LiveServer, server_command
from storage_load import (
    NUM_CLIENTS,
    PROMPT_TOKENS,
    ClientLoad,
    Conversation,
    Exchange,
    p99,
    problems,
    right_answers,
)

logger = logging.getLogger(__name__)

EPISODES = Path(__file__).resolve().parents[3] / ".cache" / "results" / "fault-episodes.jsonl"
"""One JSON line per fault, of which ``tests/run_summary.py`` makes a table."""

NUM_CONVERSATIONS = 32
NUM_REQUESTS, NUM_CONTROLS, ROUNDS = 200, 100, 4
MAX_LINES = 8
"""Of the log at the beginning and the end of a fault; ten a minute in between."""
RECOVERY_S = 30.0
BASE_S, PER_1K_S = 0.5, 0.25
DEADLINE_S = BASE_S + PER_1K_S * PROMPT_TOKENS / 1024
"""How long a request may be held for its fetch: options ``prefetch_timeout_*`` of the engines."""
HEALTHY_TOKENS = 8 * (PROMPT_TOKENS - 1)
"""Storage serves again when it served so many: one prompt of each client."""
OPTIONS = {"host_memory": "16MiB", "page_size": PAGE, "skip_slow_loads": False}
"""Host keeps 64 pages of the 128 that all conversations have, and asking in turn evicts each
before its next use: what is found is found in storage."""
STORAGE_OPTIONS = {"prefetch_min_tokens": PAGE, "log_interval_s": 2}
TIMEOUT = {"prefetch_timeout_base_s": BASE_S, "prefetch_timeout_per_1k_tokens_s": PER_1K_S}
"""The default policy. It waits no longer than computing would take, which is 50 ms here."""
DEVICE = ("--kv-cache-memory-bytes", str(12 << 20), "--max-model-len", "1024")
STORAGE_SERVED = "vllm:hicache_served_tokens_total{tier=storage}"


@contextlib.contextmanager
def engine(
    model: Path,
    folder: Path,
    storage: Mapping[str, object] | None,
    *,
    policy: Mapping[str, object] = TIMEOUT,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[LiveServer]:
    """A server that is starting, with this storage or with host memory alone; killed at the end."""
    extra: dict[str, object] = {**OPTIONS, "storage": None}
    if storage is not None:
        extra |= {**STORAGE_OPTIONS, **policy, "storage": storage}
    command = server_command(model, extra, options=DEVICE, executor=UNIPROC)
    folder.mkdir(exist_ok=True, parents=True)
    server = LiveServer([*prefix, *command], folder / "server.log", env=env)
    try:
        yield server
    finally:
        server.kill()


class Control:
    """A server without storage, and what it answers: it may still be starting when others start."""

    def __init__(self, server: LiveServer, num_conversations: int = NUM_CONVERSATIONS) -> None:
        self.server = server
        self._num_conversations = num_conversations

    @cached_property
    def conversations(self) -> list[Conversation]:
        """Prompts with the right answers."""
        return right_answers(self.server.wait_until_healthy(), self._num_conversations)


@dataclass(slots=True)
class Episode:
    """What a fault did. Counters are named as in /metrics, without ``vllm:hicache_``."""

    name: str
    control: list[Exchange] = field(default_factory=list)
    faulty: list[Exchange] = field(default_factory=list)
    """Sent between the injection and the healing."""
    others: list[Exchange] = field(default_factory=list)
    """Sent before and after."""
    recovery_s: float = 0.0
    deltas: dict[str, float] = field(default_factory=dict)
    """What the counters grew by from the injection to the recovery."""
    levels: dict[str, float] = field(default_factory=dict)
    """Every series right before the healing."""
    log: str = ""
    seconds: float = 0.0

    def grew(self, name: str) -> float:
        return self.deltas[f"vllm:hicache_{name}"]

    def level(self, name: str) -> float:
        return self.levels[f"vllm:hicache_{name}"]

    def lines(self) -> list[str]:
        """What we said in the log from the injection to the recovery, the activity line aside."""
        names = ("icache", "torage")  # of the engine's lines some say Storage only
        ours = [line for line in self.log.splitlines() if any(name in line for name in names)]
        return [line for line in ours if "HiCache: hits" not in line]

    def check(self, deadline_s: float = DEADLINE_S) -> None:
        """What is promised of every fault; the deadline is that of the engine's policy."""
        assert problems(self.control + self.faulty + self.others) == []
        assert len(self.faulty) >= NUM_REQUESTS
        bound_s = 1.1 * p99(self.control) + deadline_s
        assert p99(self.faulty) <= bound_s, (p99(self.faulty), p99(self.control))
        assert self.recovery_s <= RECOVERY_S
        assert len(self.lines()) <= MAX_LINES + self.seconds / 6, self.lines()


def suffer(
    name: str,
    control: Control,
    server: LiveServer,
    fault: AbstractContextManager[object],
    *,
    hold_s: float = 0.0,
    is_healthy: bool = True,
) -> Episode:
    """Inject under load, let the fault last for 200 requests and ``hold_s``, heal under load.

    Requests of the control and of the faulty server take turns, so that both see one machine.
    """
    episode = Episode(name)
    controls = ClientLoad(control.server, control.conversations)
    load = ClientLoad(server, control.conversations)
    with contextlib.ExitStack() as healing:
        with load.running():
            if is_healthy:
                until_storage_serves(server, timeout_s=2 * RECOVERY_S)
            before, log_start = server.metrics(), len(server.log())
            healing.enter_context(fault)
            started = time.monotonic()
            load.wait_for(2 * NUM_CLIENTS)
        for _ in range(ROUNDS):
            controls.send(NUM_CONTROLS // ROUNDS)
            load.send(NUM_REQUESTS // ROUNDS)
        with load.running():
            time.sleep(max(0.0, started + hold_s - time.monotonic()))
            episode.levels = server.metrics()
            healing.close()
            healed = time.monotonic()
            episode.recovery_s = until_storage_serves(server, RECOVERY_S)
    after = server.metrics()
    episode.seconds = time.monotonic() - started
    episode.log = server.log()[log_start:]
    episode.control = controls.exchanges
    for exchange in load.exchanges:
        is_faulty = started <= exchange.started < healed
        (episode.faulty if is_faulty else episode.others).append(exchange)
    episode.deltas = {key: value - before.get(key, 0.0) for key, value in after.items()}
    report(episode)
    return episode


def until_storage_serves(server: LiveServer, timeout_s: float) -> float:
    """Seconds until storage has served every client once more."""
    started = time.monotonic()
    before = server.metrics()[STORAGE_SERVED]
    while server.metrics()[STORAGE_SERVED] < before + HEALTHY_TOKENS:
        waited_s = time.monotonic() - started
        assert waited_s < timeout_s, f"storage serves nothing:\n{server.log()[-4000:]}"
        time.sleep(0.25)
    return time.monotonic() - started


def report(episode: Episode) -> None:
    """The row of docs/test-report.md; ``--log-cli-level=INFO`` shows it."""
    row = {
        "fault": episode.name,
        "p99_s": p99(episode.faulty),
        "control_p99_s": p99(episode.control),
        "recovery_s": episode.recovery_s,
        "num_requests": len(episode.faulty),
    }
    EPISODES.parent.mkdir(parents=True, exist_ok=True)
    with EPISODES.open("a") as episodes:
        episodes.write(json.dumps(row) + "\n")
    told = {
        key.removeprefix("vllm:hicache_"): round(value, 3)
        for key, value in episode.deltas.items()
        if key.startswith("vllm:hicache_") and value and "bucket" not in key
    }
    logger.info(
        "%s: p99 %.2f s (control %.2f s), median %.2f s (%.2f s), %d requests in %.0f s, "
        "hits after %.1f s, breaker %g; %s",
        episode.name,
        p99(episode.faulty),
        p99(episode.control),
        median(e.ttft_s for e in episode.faulty),
        median(e.ttft_s for e in episode.control),
        len(episode.faulty),
        episode.seconds - episode.recovery_s,
        episode.recovery_s,
        episode.level("breaker_open"),
        told,
    )
    logger.info("%d lines:\n%s", len(episode.lines()), "\n".join(episode.lines()[:20]))
