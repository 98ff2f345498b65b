"""Processes of the real LMCache, in an environment that tests/lmcache_env.sh makes."""

import json
import os
import select
import subprocess
from pathlib import Path

import s3_servers

HERE = Path(__file__).parent
ENVIRONMENT_SCRIPT = HERE.parents[1] / "lmcache_env.sh"
ANSWER_S = 300.0


def interpreter() -> str:
    """The one that has LMCache; takes minutes the first time."""
    done = subprocess.run(
        ["bash", ENVIRONMENT_SCRIPT], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


class Lmcache:
    """A process of LMCache: opened on one store after another, asked one thing at a time."""

    def __init__(self, python: str, session: str, log: Path) -> None:
        self._log = log
        # LMCache hashes tokens by Python's own hash where it is not told otherwise.
        own = {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
        environment = {**os.environ, **s3_servers.ENVIRONMENT, **own}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-P", HERE / session],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            )

    def ask(self, verb: str, *chunks: int, **more: object) -> dict:
        """What it answers to a request."""
        request = {"do": verb, **({"chunks": chunks} if chunks else {}), **more}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        line = self._process.stdout.readline() if ready else ""
        assert line, f"no answer to {request}\n{self._log.read_text()[-3000:]}"
        return json.loads(line)

    def end(self) -> None:
        """Let it come to its end, which must be a good one."""
        self._process.stdin.close()
        try:
            assert self._process.wait(60) == 0, self._log.read_text()[-3000:]
        finally:
            self._process.kill()
            self._process.stdout.close()
