"""A storage backend of one's own, one SQLite file. Run it to check it by the conformance suite."""

import sqlite3
import sys

from vllm_hicache.storage_backends.blocking import BlockingBackend
from vllm_hicache.storage_backends.conformance_run import check_backend


class SqliteBackend(BlockingBackend):
    name = "sqlite"
    errors = (sqlite3.Error,)

    def connect(self) -> None:
        self.db = sqlite3.connect(self.query["file"], timeout=60, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("CREATE TABLE IF NOT EXISTS objects (name PRIMARY KEY, data)")
        self.disconnect = self.db.close

    def length(self, name: str) -> int | None:
        found = self.db.execute("SELECT length(data) FROM objects WHERE name = ?", (name,))
        return next((length for (length,) in found), None)

    def get(self, name: str) -> bytes | None:
        found = self.db.execute("SELECT data FROM objects WHERE name = ?", (name,))
        return next((data for (data,) in found), None)

    def put(self, name: str, data: bytes) -> bool:
        return self.db.execute("REPLACE INTO objects VALUES (?, ?)", (name, data)).rowcount > 0

    def remove(self, name: str) -> bool:
        return self.db.execute("DELETE FROM objects WHERE name = ?", (name,)).rowcount > 0

    def names(self, part: str) -> list[str]:
        return [name for (name,) in self.db.execute("SELECT name FROM objects") if part in name]


if __name__ == "__main__":
    sys.exit(check_backend("custom_backend:SqliteBackend?file={place}/objects.db"))
