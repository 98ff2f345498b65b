"""Clients that keep a server busy while a test does something to it."""

import contextlib
import threading
import urllib.error
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from live_server import ANSWER_TIMEOUT_S, PAGE, Answer, LiveServer, prompt_of, wait_until


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one prompt: an answer, or the error that ended its client."""

    prompt: Sequence[int]
    answer: Answer | None
    error: Exception | None = None


@contextlib.contextmanager
def load_on(
    server: LiveServer,
    *,
    num_clients: int = 3,
    num_tokens: int = 6 * PAGE,
    max_tokens: int = 8,
    patience_s: float = ANSWER_TIMEOUT_S,
) -> Iterator[list[Outcome]]:
    """Clients that send one new prompt after the other; yields what became of them so far.

    Entered when each has had an answer. A client ends at its first error, all end at the exit.
    A server that kills its engine may leave requests without an answer and wait for their
    clients: such a client hangs up after ``patience_s``.
    """
    outcomes: list[Outcome] = []
    ended = threading.Event()

    def send(client: int) -> None:
        number = 0
        while not ended.is_set():
            number += 1
            prompt = prompt_of(10_000 * (client + 1) + number, num_tokens)
            try:
                answer = server.complete(prompt, max_tokens, patience_s=patience_s)
                outcomes.append(Outcome(prompt, answer))
            except (OSError, urllib.error.HTTPError, ValueError) as error:
                outcomes.append(Outcome(prompt, None, error))
                return

    clients = [threading.Thread(target=send, args=(i,)) for i in range(num_clients)]
    for client in clients:
        client.start()
    try:
        wait_until(lambda: len(outcomes) >= num_clients)
        yield outcomes
    finally:
        ended.set()
        for client in clients:
            client.join()
