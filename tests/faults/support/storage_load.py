"""Streaming clients of a server: how long each waited for its first token, and what it was told."""

import contextlib
import http.client
import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from live_server import PAGE, LiveServer, prompt_of

NUM_CLIENTS = 8
PROMPT_TOKENS = 4 * PAGE + 1
ANSWER_TOKENS = 4
PATIENCE_S = 60.0
MIN_MARGIN = 1e-3
"""Between the logprobs of the best and the second token. Other chunks of a prompt move them by
1e-5: an answer that is nearer to a tie says nothing about the KV it was computed from."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the one right greedy answer to it."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request: when it was sent, seconds to its first token, what was wrong ("": nothing)."""

    started: float
    ttft_s: float
    problem: str


def right_answers(server: LiveServer, num_conversations: int) -> list[Conversation]:
    """Conversations that share no page, with answers of a server that computes each alone."""
    found: list[Conversation] = []
    for seed in count(1):
        prompt = prompt_of(seed, PROMPT_TOKENS)
        reply = server.post("/v1/completions", {**_question(prompt), "logprobs": 2})
        choice = reply["choices"][0]
        margins = [
            max(best.values()) - min(best.values()) for best in choice["logprobs"]["top_logprobs"]
        ]
        if min(margins) > MIN_MARGIN:
            found.append(Conversation(prompt, choice["token_ids"]))
        if len(found) == num_conversations:
            return found
    raise AssertionError("seeds never end")


def _question(prompt: list[int]) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def ask(server: LiveServer, conversation: Conversation) -> Exchange:
    """Send one prompt, read its answer token by token; never raises for what the server does."""
    started = time.monotonic()
    try:
        ttft_s, tokens = _stream(server, conversation.prompt, started)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return Exchange(started, math.inf, f"failed: {error!r}")
    if tokens != conversation.answer:
        return Exchange(started, ttft_s, f"{tokens} instead of {conversation.answer}")
    return Exchange(started, ttft_s, "")


def _stream(server: LiveServer, prompt: list[int], started: float) -> tuple[float, list[int]]:
    body = json.dumps({**_question(prompt), "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    ttft_s, tokens = math.inf, []
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise ValueError(f"status {response.status}: {response.read()!r}")
        for line in response:
            if line.startswith(b"data: {"):
                ttft_s = min(ttft_s, time.monotonic() - started)
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    finally:
        connection.close()
    return ttft_s, tokens


class ClientLoad:
    """Clients that ask a server about one conversation after the other, in turn, while running."""

    def __init__(
        self,
        server: LiveServer,
        conversations: Sequence[Conversation],
        num_clients: int = NUM_CLIENTS,
    ) -> None:
        self.exchanges: list[Exchange] = []
        self._server = server
        self._conversations = conversations
        self._num_clients = num_clients
        self._turn = count()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """All clients send; at the exit each has had its answer."""
        ended = threading.Event()
        clients = [
            threading.Thread(target=self._send, args=(ended,)) for _ in range(self._num_clients)
        ]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            ended.set()
            for client in clients:
                client.join()

    def send(self, num_exchanges: int) -> None:
        """At least so many requests, by all clients."""
        with self.running():
            self.wait_for(num_exchanges)

    def wait_for(self, num_exchanges: int, timeout_s: float = 300.0) -> None:
        """Return when so many more requests have been answered."""
        end = len(self.exchanges) + num_exchanges
        deadline = time.monotonic() + timeout_s
        while len(self.exchanges) < end:
            assert time.monotonic() < deadline, f"{end - len(self.exchanges)} are missing"
            time.sleep(0.02)

    def _send(self, ended: threading.Event) -> None:
        while not ended.is_set():
            turn = next(self._turn) % len(self._conversations)
            self.exchanges.append(ask(self._server, self._conversations[turn]))


def p99(exchanges: Sequence[Exchange]) -> float:
    """Seconds to the first token that 99 of 100 requests did not exceed."""
    waits = sorted(exchange.ttft_s for exchange in exchanges)
    return waits[math.ceil(0.99 * len(waits)) - 1]


def problems(exchanges: Sequence[Exchange]) -> list[str]:
    """What was wrong with any of them."""
    return [exchange.problem for exchange in exchanges if exchange.problem]
