"""The whole error taxonomy: what is raised, where, and who may catch it.

A miss, a full pool and a short fetch are values, never exceptions.
"""


class HiCacheError(Exception):
    """Base of every error of this package; never raised itself."""


class ConfigError(HiCacheError, ValueError):
    """A bad option, model or vLLM version. Raised at start only; the engine refuses to start.

    The message says what was wrong, what was given, what is allowed and what to do.
    """


class BackendError(HiCacheError):
    """A storage operation failed; the caller turns it into a shorter answer."""

    def __init__(
        self, message: str, *, backend: str = "", operation: str = "", key: str = ""
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.operation = operation
        self.key = key


class BackendUnavailable(BackendError, ConnectionError):
    """The service cannot be reached, refused the connection, or its circuit is open."""


class BackendTimeout(BackendUnavailable, TimeoutError):
    """The deadline of a storage operation passed."""


class CorruptShard(BackendError):
    """A stored object has a wrong length, header or checksum. It is a miss and is removed."""


class InvariantBroken(HiCacheError, AssertionError):
    """The bookkeeping contradicts itself. The engine stops: wrong KV is worse than no KV."""


class LayerLoadFailed(HiCacheError, RuntimeError):
    """A forward under way needs what a load could not bring. The engine stops: see above."""


class RankDivergence(InvariantBroken):
    """Workers did different things, and the rank-consensus checker was told to stop the engine."""
