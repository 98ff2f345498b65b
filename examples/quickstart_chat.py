"""Client and checker of quickstart.sh: chat, repeat the chat, print what each tier restored.

`first` holds two turns; `reset` drops vLLM's own prefix cache; `again TIER` repeats the second turn
and expects its prompt from TIER; `table` exits 1 if an answer differs or an expected hit is not
there.
"""

import argparse
import json
import sys
import time
import urllib.request
from pathlib import Path

from openai import OpenAI

TIERS = ("device", "host", "disk")
SOURCE_SERIES = "vllm:prompt_tokens_cached_by_source_total"
PAGE_TOKENS = 64
MAX_LOGPROB_DIFFERENCE = 0.1
STOCK = "\n".join(f"Shelf {n} holds {n * 37 % 91 + 5} boxes of part {n * 7919}." for n in range(90))
QUESTIONS = ("Which shelf holds the most boxes?", "And which one holds the fewest?")


class Chat:
    """One model behind one server; notes of every turn are kept in a JSON file between calls."""

    def __init__(self, url: str, notes: Path, *, warm_up: bool = True) -> None:
        self._url = url
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
        self._model = self._client.models.list().data[0].id
        self._notes = notes
        self.turns: list[dict] = json.loads(notes.read_text()) if notes.exists() else []
        if warm_up:
            self._answer([{"role": "user", "content": "warm up"}])

    def say(self, name: str, messages: list[dict], expected: dict) -> dict:
        """Send one turn and note it: tokens by tier, time to first token, answer, expectation."""
        turn = self.measure(messages)
        turn |= {"name": name, "messages": messages, "expected": expected}
        self.note(turn)
        return turn

    def measure(self, messages: list[dict], **options: str) -> dict:
        """The answer, the time to its first token, and tokens by tier; ``options`` are vLLM's."""
        before = self._cached_tokens()
        turn = self._answer(messages, **options)
        cached = turn.pop("cached")
        deadline = time.monotonic() + 5
        while True:
            now = self._cached_tokens()
            tiers = {tier: int(now[tier] - before[tier]) for tier in now}
            if sum(tiers.values()) >= cached or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return turn | {"cached": cached, "tiers": tiers}

    def note(self, turn: dict) -> None:
        """Keep a turn for the next call of this program."""
        self.turns.append(turn)
        self._notes.write_text(json.dumps(self.turns))

    def _answer(self, messages: list[dict], **options: str) -> dict:
        tokens, text, first = [], "", None
        started = time.perf_counter()
        stream = self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            max_tokens=24,
            temperature=0,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=options,
        )
        for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.logprobs and choice.logprobs.content:
                    first = first or time.perf_counter()
                    tokens += [[t.token, t.bytes, t.logprob] for t in choice.logprobs.content]
        details = usage.prompt_tokens_details
        return {
            "text": text,
            "tokens": tokens,
            "ttft_s": first - started,
            "prompt_tokens": usage.prompt_tokens,
            "cached": (details.cached_tokens or 0) if details else 0,
        }

    def _cached_tokens(self) -> dict[str, float]:
        found = dict.fromkeys(TIERS, 0.0)
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(SOURCE_SERIES + "{"):
                    source = line.partition('source="')[2].partition('"')[0]
                    found[source] = found.get(source, 0.0) + float(line.rpartition(" ")[2])
        return found


def reset_prefix_cache(url: str) -> None:
    """Drop what vLLM keeps on the device; the connector keeps its pages (no reset_external)."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        if not json.load(answer)["success"]:
            sys.exit("vLLM could not reset its prefix cache: blocks are still held")


def first_turns(chat: Chat) -> None:
    """Turn 1 finds nothing; turn 2 contains turn 1 and finds it in vLLM's own prefix cache."""
    messages = [{"role": "user", "content": f"{STOCK}\n{QUESTIONS[0]}"}]
    turn = chat.say("turn 1", messages, {"device": 0, "host": 0, "disk": 0})
    messages = [
        *messages,
        {"role": "assistant", "content": turn["text"]},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    chat.say("turn 2, contains turn 1", messages, {"device": turn["prompt_tokens"] // 2})


def repeat_turn(chat: Chat, tier: str) -> None:
    """Repeat turn 2; all of its whole pages but the last must come from ``tier``."""
    turn = chat.turns[1]
    why = {"host": "vLLM's cache dropped", "disk": "server restarted"}[tier]
    expected = {tier: turn["prompt_tokens"] - 2 * PAGE_TOKENS}
    chat.say(f"turn 2 again, {why}", turn["messages"], expected)


def is_same(turn: dict, other: dict, within: float = MAX_LOGPROB_DIFFERENCE) -> bool:
    """The same tokens, each as likely as before."""
    pairs = list(zip(turn["tokens"], other["tokens"], strict=False))
    return len(turn["tokens"]) == len(other["tokens"]) and all(
        mine[:2] == theirs[:2] and abs(mine[2] - theirs[2]) <= within for mine, theirs in pairs
    )


def problems_of(turn: dict, reference: dict | None) -> list[str]:
    """What is not as it should be in one turn."""
    found = []
    for tier, least in turn["expected"].items():
        got = turn["tiers"][tier]
        if got < least or (not least and got):
            found.append(f"{turn['name']}: {got} tokens from {tier}, expected {least or 'none'}")
    if sum(turn["tiers"].values()) != turn["cached"]:
        found.append(f"{turn['name']}: usage says {turn['cached']} cached, metrics {turn['tiers']}")
    if reference is not None and not is_same(turn, reference):
        found.append(f"{turn['name']}: another answer: {turn['text']!r}, not {reference['text']!r}")
    return found


def print_table(turns: list[dict]) -> list[str]:
    """Print one line per turn; return every problem."""
    found = []
    print(f"{'turn':38}{'prompt':>8}{'device':>8}{'host':>8}{'disk':>8}{'TTFT':>10}  same answer")
    for number, turn in enumerate(turns):
        reference = turns[1] if number > 1 else None
        found += problems_of(turn, reference)
        same = "-" if reference is None else "yes" if is_same(turn, reference) else "NO"
        tiers = "".join(f"{turn['tiers'][tier]:>8}" for tier in TIERS)
        ttft = f"{turn['ttft_s'] * 1000:.1f} ms"
        print(f"{turn['name']:38}{turn['prompt_tokens']:>8}{tiers}{ttft:>10}  {same}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url")
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("step", choices=["first", "reset", "again", "table"])
    parser.add_argument("tier", nargs="?", choices=["host", "disk"])
    options = parser.parse_args()
    if options.step == "table":
        found = print_table(json.loads(options.notes.read_text()))
        for problem in found:
            print(f"PROBLEM: {problem}")
        return 1 if found else 0
    if options.step == "reset":
        reset_prefix_cache(options.url)
        return 0
    chat = Chat(options.url, options.notes)
    if options.step == "first":
        first_turns(chat)
    else:
        repeat_turn(chat, options.tier)
    return 0


if __name__ == "__main__":
    sys.exit(main())
