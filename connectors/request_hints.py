"""What a request says about its own KV: ``kv_transfer_params={"hicache": {"store": false}}``.

Hints are wishes: a bad one is told and not followed, and the request is served.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_hicache.errors import ConfigError
from vllm_hicache.masking import shown
from vllm_hicache.metrics import Metrics

logger = logging.getLogger(__name__)

KEY = "hicache"
MAX_PRIORITY = 100
MAX_PIN_S = 86_400
"""A day. Longer, a forgotten hint would outlive what it was meant for."""
_ALLOWED = {
    "load": "true or false",
    "store": "true or false",
    "priority": f"a whole number from 0 to {MAX_PRIORITY}",
    "pin_s": f"a number of seconds from 0 to {MAX_PIN_S}",
}
MAX_TOLD = 20
"""A client that sends bad hints sends many; the counter has them all."""


@dataclass(frozen=True, slots=True)
class Hints:
    """``load``: take pages from host and storage. ``store``: keep pages there that it computes.
    ``priority``: of its pages in host, where the policy ``priority`` evicts lower ones first.
    ``pin_s``: seconds after its end for which its pages stay in host, within a limit."""

    load: bool = True
    store: bool = True
    priority: int = 0
    pin_s: float = 0

    @classmethod
    def parse(cls, params: object) -> "Hints":
        """The hints among vLLM's ``kv_transfer_params``; ``ConfigError`` says what is wrong.

        >>> Hints.parse({"hicache": {"store": False}, "others": 1})
        Hints(load=True, store=False, priority=0, pin_s=0)
        """
        table = params.get(KEY) if isinstance(params, Mapping) else None
        if table is None:
            return _NONE
        if not isinstance(table, Mapping):
            raise ConfigError(f"{KEY} must be a table of hints, got {shown(table)}")
        for name, value in table.items():
            if name not in _ALLOWED:
                raise ConfigError(f"unknown hint {shown(name)}; there are {', '.join(_ALLOWED)}")
            if not _is_valid(name, value):
                raise ConfigError(f"hint {name} must be {_ALLOWED[name]}, got {shown(value)}")
        return cls(**table)


_NONE = Hints()


def _is_valid(name: str, value: object) -> bool:
    if name == "priority":
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_PRIORITY
    if name == "pin_s":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and 0 <= value <= MAX_PIN_S  # type: ignore[operator]
    return isinstance(value, bool)


class HintReader:
    """Reads the hints of every request; what is not understood is counted, and told at first."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: set[str] = set()

    def read(self, params: object) -> Hints:
        """The hints; none at all where one of them is bad."""
        if params is None:
            return _NONE
        try:
            return Hints.parse(params)
        except ConfigError as error:
            self._metrics.count("bad_hints")
            if str(error) not in self._told and len(self._told) < MAX_TOLD:
                self._told.add(str(error))
                logger.warning("HiCache: hints of a request are not followed: %s", error)
            return _NONE
