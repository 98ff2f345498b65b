"""Conversations in groups that share a system prompt, as token ids that follow from a seed.

The prompt of a turn is the system prompt of the group, then for every earlier turn the user's
message and the model's own answer, then the message of this turn.
"""

from dataclasses import dataclass, field

import numpy as np

_SYSTEM, _USER = 0, 1


@dataclass(frozen=True, slots=True)
class Conversations:
    """The sizes of a multi-turn workload; all in tokens but for the counts."""

    groups: int
    per_group: int
    turns: int
    system_tokens: int
    user_tokens: int
    answer_tokens: int
    vocab_size: int
    seed: int = 0

    @property
    def num_conversations(self) -> int:
        """Of all groups."""
        return self.groups * self.per_group

    @property
    def longest_tokens(self) -> int:
        """Prompt and answer of the last turn."""
        return self.system_tokens + self.turns * (self.user_tokens + self.answer_tokens)

    @property
    def distinct_tokens(self) -> int:
        """Tokens whose KV differs when all is said: what a cache would have to hold.

        >>> Conversations(4, 8, 10, 8192, 1024, 512, 128256).distinct_tokens
        524288
        """
        own = self.turns * (self.user_tokens + self.answer_tokens)
        return self.groups * self.system_tokens + self.num_conversations * own

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all turns of all conversations together."""
        per_turn = self.user_tokens + self.answer_tokens
        later = per_turn * (self.turns * (self.turns - 1) // 2)
        return self.num_conversations * (
            self.turns * (self.system_tokens + self.user_tokens) + later
        )

    def system_prompt(self, group: int) -> list[int]:
        """The same for all conversations of the group, and for no other group."""
        return self._random((_SYSTEM, group), self.system_tokens)

    def message(self, conversation: int, turn: int) -> list[int]:
        """What the user says in a turn."""
        return self._random((_USER, conversation, turn), self.user_tokens)

    def group_of(self, conversation: int) -> int:
        """Neighbours belong to different groups, so that groups progress alike."""
        return conversation % self.groups

    def _random(self, words: tuple[int, ...], num_tokens: int) -> list[int]:
        random = np.random.default_rng((self.seed, *words))
        return [int(token) for token in random.integers(0, self.vocab_size, num_tokens)]

    def warm_up(self, concurrency: int) -> "Conversations":
        """Prompts as long as the first turn, once each; none begins as a conversation does."""
        return Conversations(
            groups=concurrency,
            per_group=1,
            turns=1,
            system_tokens=0,
            user_tokens=self.system_tokens + self.user_tokens,
            answer_tokens=min(self.answer_tokens, 16),
            vocab_size=self.vocab_size,
            seed=self.seed,
        )


@dataclass(slots=True)
class Conversation:
    """One conversation while it is held."""

    number: int
    history: list[int]
    turn: int = 0
    prompt: list[int] = field(default_factory=list)

    def ask(self, message: list[int]) -> list[int]:
        """The prompt of the next turn."""
        self.prompt = self.history + message
        return self.prompt

    def hear(self, answer: tuple[int, ...]) -> None:
        """Take the model's answer; the turn is over."""
        self.history = self.prompt + list(answer)
        self.turn += 1
