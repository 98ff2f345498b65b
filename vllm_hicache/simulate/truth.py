"""What every page of a story must hold, computed from its tokens alone."""

from vllm_hicache.simulate.contents import Tag, pure_tags, weights_of
from vllm_hicache.simulate.requests import Tokens


class Truth:
    """Contents of pages by namespace and hash, for all tokens that the story has known."""

    def __init__(self, page_size: int, granule: int) -> None:
        self.tokens: list[Tokens] = []
        self._page_size = page_size
        self._granule = granule
        self._known: dict[tuple[str, bytes], tuple[Tag, ...]] = {}

    def expected(self, namespace: str, page_hash: bytes) -> tuple[Tag, ...]:
        """What the page holds, by the weights that the namespace stands for."""
        found = self._known.get((namespace, page_hash))
        if found is None:
            for tokens in reversed(self.tokens):
                self._learn(tokens, namespace)
            found = self._known[namespace, page_hash]
        return found

    def _learn(self, tokens: Tokens, namespace: str) -> None:
        num_pages = tokens.num_tokens // self._page_size
        hashes = tokens.page_hashes(num_pages)
        if not num_pages or (namespace, hashes[num_pages - 1]) in self._known:
            return
        tags = pure_tags(tokens.ids, self._granule, weights_of(namespace))
        width = self._page_size // self._granule
        for i in range(num_pages):
            self._known[namespace, hashes[i]] = tuple(tags[i * width : (i + 1) * width])
