"""Sizes and prompts of the interference benchmark."""

from dataclasses import dataclass

import numpy as np

QUIET, RESTORING = "saving alone", "restoring beside"
"""All that a wave computes is saved meanwhile; and stored prompts are restored besides."""
FRESH, SEEN = 0, 1


@dataclass(frozen=True, slots=True)
class Waves:
    """Sizes of the waves; all in tokens but for the counts."""

    concurrencies: tuple[int, ...]
    waves: int
    """Counted ones of each kind and concurrency; one more warms up."""
    prompt_tokens: int
    output_tokens: int
    seen: int
    """Stored prompts that are asked for again during a wave, one after another."""
    seen_tokens: int
    vocab_size: int
    seed: int
    restores: bool
    """Whether the engine has a connector to restore with."""
    from_files: bool
    """Whether host memory is emptied, too, before prompts are asked for again."""

    def prompts(self, kind: int, key: tuple[int, ...]) -> list[list[int]]:
        """Fresh prompts of a wave, or the stored ones."""
        count = key[0] if kind == FRESH else self.seen
        length = self.prompt_tokens if kind == FRESH else self.seen_tokens
        random = np.random.default_rng((self.seed, kind, *key))
        return [row.tolist() for row in random.integers(0, self.vocab_size, (count, length))]
