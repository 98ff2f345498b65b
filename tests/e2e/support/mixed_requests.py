"""Requests as agents send them: conversations that grow, repetitions, scans, tenants, aborts.

The same seed gives the same requests. Prompts are short, so that a tiny pool is a busy one.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine_in_process import PAGE, prompt_of

NUM_TURNS, TURN_TOKENS = 8, 2 * PAGE + 21
SYSTEM_TOKENS = 4 * PAGE
TENANT, TENANT_PROMPTS, TENANT_PAGES = "a tenant", 6, 12
NUM_CONVERSATIONS = 24
WEIGHTS = {
    "turn": 46,
    "again": 28,
    "aligned": 6,
    "scan": 5,
    "branch": 4,
    "tenant": 4,
    "unwanted": 2,
    "unread": 2,
}
ABORTED = 0.08


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request. ``steps`` until it is aborted, or None."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None

    @property
    def asked(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"prompt_token_ids": list(self.prompt)}
        return asked | ({"cache_salt": self.salt} if self.salt else {})


class Conversations:
    """All of them; a few are asked much more often than the others."""

    def __init__(self, source: random.Random, number: int) -> None:
        self._source = source
        self._names = [f"conversation {i}" for i in range(number)]
        self._turns = dict.fromkeys(self._names, 0)
        self._lives = dict.fromkeys(self._names, 0)
        self._weights = [1.0 / (1 + i) ** 0.5 for i in range(number)]

    def some(self) -> str:
        return self._source.choices(self._names, self._weights)[0]

    def go_on(self, name: str) -> None:
        """The next turn; after the last one another conversation takes its place."""
        self._turns[name] += 1
        if self._turns[name] > NUM_TURNS:
            self._turns[name] = 1
            self._lives[name] += 1

    def prompt(self, name: str) -> list[int]:
        tail = prompt_of((name, self._lives[name]), NUM_TURNS * TURN_TOKENS)
        system = prompt_of(("system", int(name.split()[1]) % 3), SYSTEM_TOKENS)
        return system + tail[: max(1, self._turns[name]) * TURN_TOKENS]


def stored_before(num_conversations: int = NUM_CONVERSATIONS) -> list[dict[str, Any]]:
    """Whole conversations and the tenant's prompts, as an engine has left them in storage."""
    talks = Conversations(random.Random(0), num_conversations)
    asked: list[dict[str, Any]] = []
    for i in range(num_conversations):
        name = f"conversation {i}"
        for _ in range(NUM_TURNS):
            talks.go_on(name)
        asked.append({"prompt_token_ids": talks.prompt(name)})
    return asked + [
        {"prompt_token_ids": tenant_prompt(i), "cache_salt": TENANT} for i in range(TENANT_PROMPTS)
    ]


def tenant_prompt(number: int) -> list[int]:
    return prompt_of(("tenant", number), TENANT_PAGES * PAGE + 9)


def kinds_of(source: random.Random, number: int) -> list[str]:
    """Requests of the tenant come three at a time: its limit is on what it fetches at once."""
    kinds: list[str] = []
    while len(kinds) < number:
        kind = source.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        kinds += [kind] * (3 if kind == "tenant" else 1)
    return kinds[:number]


def requests(
    seed: int, number: int, num_conversations: int = NUM_CONVERSATIONS
) -> Iterator[Wanted]:
    """So many requests."""
    source = random.Random(seed)
    talks = Conversations(source, num_conversations)
    for i, kind in enumerate(kinds_of(source, number)):
        name = talks.some()
        if kind == "turn":
            talks.go_on(name)
        prompt, salt, params = talks.prompt(name), "", {}
        if kind == "aligned":
            prompt = prompt[: len(prompt) // PAGE * PAGE]
        elif kind == "scan":
            prompt = prompt_of(("scan", seed, i), source.randrange(3, 16) * PAGE + 9)
        elif kind == "branch":  # one page of it is known
            own = prompt_of(("own", i % 12), PAGE)
            prompt = own + prompt_of(("branch", seed, i), 3 * PAGE + 9)
        elif kind == "tenant":
            salt, prompt = TENANT, tenant_prompt(source.randrange(TENANT_PROMPTS))
        elif kind == "unwanted":
            params = {"extra_args": {"kv_transfer_params": {"hicache": {"load": False}}}}
        elif kind == "unread":
            params = {"skip_reading_prefix_cache": True}
        steps = source.randrange(1, 12) if source.random() < ABORTED else None
        yield Wanted(kind, tuple(prompt), 2 + len(prompt) % 3, salt, params, steps)
