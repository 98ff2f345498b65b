"""What one engine of a benchmark is: vLLM's arguments, the connector of its arm, its process."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine; it travels to the process that runs it as JSON."""

    arm: str
    engine: dict[str, Any]
    """Arguments of vLLM's engine, without the connector."""
    connector: str
    """Name of the connector class; empty without one."""
    connector_options: dict[str, Any]
    environment: dict[str, str]
    """Variables of the engine's process besides this one's."""
    in_process: bool
    """Whether the engine shares the process of its clients."""
    vocab_size: int
    bytes_per_token: int
    host_bytes: int = 0
    """Host memory of all workers together."""
    storage: Path | None = None
    """Folder of the stored pages."""

    def as_json(self) -> dict[str, Any]:
        """The plan in JSON's types."""
        table: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return table

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "EnginePlan":
        """Undo ``as_json``."""
        storage = table["storage"]
        return cls(**{**table, "storage": None if storage is None else Path(storage)})
