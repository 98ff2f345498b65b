"""Client and checker of s3_shared_cache.sh and redis_tier.sh: one conversation, many engines.

`say` asks the next question; `again` repeats the last turn; `drop` empties device and host memory.
Each answer is compared with that of the same engine to the same messages under a new cache salt,
for which nothing is cached. `table` prints all turns and exits 1 where something is not right.
"""

import argparse
import json
import sys
import time
import urllib.request
import uuid
from pathlib import Path

from quickstart_chat import PAGE_TOKENS, STOCK, TIERS, Chat, is_same

QUESTIONS = (
    "Which shelf holds the most boxes?",
    "And which one holds the fewest?",
    "How many boxes are there in all?",
    "Which shelves hold the same number?",
)


def next_messages(turns: list[dict], label: str) -> list[dict]:
    """The last turn, its answer, and the next question. A label starts another conversation."""
    number = len({turn["name"] for turn in turns})
    question = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
    if not turns:
        return [question | {"content": f"{label}\n{STOCK}\n{question['content']}"}]
    last = turns[-1]
    return [*last["messages"], {"role": "assistant", "content": last["text"]}, question]


def expected_tokens(turns: list[dict], tier: str, *, is_repeated: bool) -> dict[str, int]:
    """Least tokens from a tier: whole pages of what was asked before, less one for its seam."""
    known = turns[-1]["prompt_tokens"] if turns else 0
    least = max(known // PAGE_TOKENS * PAGE_TOKENS - PAGE_TOKENS * is_repeated, 0)
    others = dict.fromkeys(TIERS, 0)
    return others if tier == "none" else others | {tier: least}


def ask(chat: Chat, options: argparse.Namespace) -> None:
    """Ask, ask the same without any cache, and note both."""
    is_repeated = options.step == "again"
    turns = chat.turns
    messages = turns[-1]["messages"] if is_repeated else next_messages(turns, options.label)
    expected = expected_tokens(turns, options.expect, is_repeated=is_repeated)
    turn = chat.measure(messages)
    cold = chat.measure(messages, cache_salt=uuid.uuid4().hex)
    chat.note(
        turn
        | {"name": options.name, "engine": options.engine, "messages": messages}
        | {"expected": expected, "cold": cold, "deadline_s": options.deadline_s}
    )


def drop_pages(url: str, patience_s: float = 20.0) -> None:
    """Empty vLLM's prefix cache and host memory; with `fixed_weights` stored pages are kept.

    vLLM says no while a block is in use: what was answered last may still be on its way to host.
    """
    request = urllib.request.Request(f"{url}/reset_prefix_cache?reset_external=true", method="POST")
    deadline = time.monotonic() + patience_s
    while True:
        with urllib.request.urlopen(request, timeout=60) as answer:
            if json.load(answer)["success"]:
                return
        if time.monotonic() > deadline:
            sys.exit("vLLM could not reset its prefix cache: blocks are still held")
        time.sleep(0.2)


def problems_of(turn: dict, control_s: float, within: float) -> list[str]:
    """What is not as it should be in one turn."""
    cold, tiers = turn["cold"], turn["tiers"]
    found = []
    for tier, least in turn["expected"].items():
        got = tiers[tier]
        if got < least or (not least and got):
            found.append(f"{got} tokens from {tier}, expected {least or 'none'}")
    if sum(tiers.values()) != turn["cached"]:
        found.append(f"usage says {turn['cached']} cached, metrics {tiers}")
    if cold["cached"]:
        found.append(f"{cold['cached']} tokens of the cold answer were cached")
    if not is_same(turn, cold, within):
        found.append(f"another answer: {turn['text']!r}, without cache {cold['text']!r}")
    limit_s = 1.1 * control_s + turn["deadline_s"]
    if turn["deadline_s"] and turn["ttft_s"] > limit_s:
        found.append(f"first token after {turn['ttft_s']:.2f} s, allowed are {limit_s:.2f} s")
    return [f"{turn['name']}: {problem}" for problem in found]


def print_table(turns: list[dict], storage: str, within: float) -> list[str]:
    """Print one line per turn; return every problem."""
    found = []
    control_s = max((turn["cold"]["ttft_s"] for turn in turns), default=0.0)
    names = "".join(f"{name:>8}" for name in ("prompt", "device", "host", storage))
    print(f"{'turn':34}{'engine':10}{names}{'TTFT':>11}{'no cache':>11}  same answer")
    for turn in turns:
        found += problems_of(turn, control_s, within)
        tiers = "".join(f"{turn['tiers'][tier]:>8}" for tier in TIERS)
        times = "".join(f"{one['ttft_s'] * 1000:>8.1f} ms" for one in (turn, turn["cold"]))
        same = "yes" if is_same(turn, turn["cold"], within) else "NO"
        where = f"{turn['name']:34}{turn['engine']:10}"
        print(f"{where}{turn['prompt_tokens']:>8}{tiers}{times}  {same}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url")
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--name", help="of the turn, for the table")
    parser.add_argument("--engine", default="", help="what answers, for the table")
    parser.add_argument("--label", default="", help="what the first question starts with")
    parser.add_argument("--expect", choices=["none", *TIERS], help="where tokens must come from")
    parser.add_argument("--deadline-s", type=float, default=0.0, help="longest wait for storage")
    parser.add_argument("--warm-up", action="store_true", help="ask something else first")
    parser.add_argument("--storage", default="storage", help="its name in the table")
    parser.add_argument("--within", type=float, default=0.1, help="allowed between logprobs")
    parser.add_argument("step", choices=["say", "again", "drop", "table"])
    options = parser.parse_args()
    if options.step == "table":
        turns = json.loads(options.notes.read_text())
        found = print_table(turns, options.storage, options.within)
        for problem in found:
            print(f"PROBLEM: {problem}")
        return 1 if found else 0
    if options.step == "drop":
        drop_pages(options.url)
    else:
        ask(Chat(options.url, options.notes, warm_up=options.warm_up), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
