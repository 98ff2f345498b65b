"""Everything that only a GPU host can show, one job on each GPU at a time.

    python benchmarks/gpu_suite.py --out results/
    python benchmarks/gpu_suite.py --only multiturn,interference --gpus 0,1 --out results/
    python benchmarks/gpu_suite.py --list

Jobs are taken in the order of ``--list``. Each has its log in ``--out/NAME.log`` and its results in
``--out/NAME``; one that has passed there before is not run again, so that a suite that was cut off
goes on. The exit status is 1 when a job failed or ran out of time.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from vllm_hicache.benchmarks.run_record import table

ROOT = Path(__file__).resolve().parent.parent
STATUS = "gpu_suite.json"
_LLAMA = ("--shape", "llama-8b", "--dtype", "bfloat16")
_BENCH = ("-m", "vllm_hicache.cli", "bench")
_PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
_TURNS = ("--turns", "6", "--user-tokens", "2432", "--answer-tokens", "128")
_POOLS = ("--device-kv-bytes", "16GiB", "--host-memory", "64GiB")
_LENGTHS = ("--lengths", "8192,32768,65536", "--block-size", "16", "--evict-by", "prompts")
_LAYERWISE = ("--arm-options", 'hicache={"load_mode": "layerwise"}')
_MULTITURN = (*_BENCH, "multiturn", *_LLAMA, *_TURNS, *_POOLS)
_RESTORE = (*_BENCH, "restore", *_LLAMA, *_LENGTHS, "--device-kv-bytes", str(10 << 30))


@dataclass(frozen=True, slots=True)
class Job:
    """Arguments of the interpreter; OUT stands for the job's folder."""

    name: str
    arguments: tuple[str, ...]
    limit_s: int
    """Then it is ended and counts as failed."""


JOBS = (
    Job("fetch", ("benchmarks/fetch_rate.py", "OUT/pages", "--pages", "128", "--out", "OUT"), 200),
    Job(
        "restore-files",
        (
            *_RESTORE,
            "--host-memory",
            "28GiB",
            "--storage",
            "OUT/pages",
            "--evict-by",
            "reset",
            "--repeat",
            "3",
            "--out",
            "OUT",
        ),
        500,
    ),
    Job("units", (*_PYTEST, "-m", "gpu and not e2e", "tests"), 400),
    Job("engines", (*_PYTEST, "-m", "gpu and e2e", "tests/e2e"), 900),
    Job(
        "interference-files",
        (
            *_BENCH,
            "interference",
            *_LLAMA,
            "--arms",
            "none,hicache+file",
            "--waves",
            "3",
            "--storage",
            "OUT/pages",
            "--out",
            "OUT",
        ),
        600,
    ),
    Job("pinning", ("benchmarks/pin_pool.py", "--gib", "2", "8", "32", "--out", "OUT"), 200),
    Job("copies", ("benchmarks/copy_paths.py", "--json", "OUT/copy_paths.json"), 200),
    Job(
        "multiturn-layerwise",
        (*_MULTITURN, "--arms", "hicache", *_LAYERWISE, "--out", "OUT"),
        400,
    ),
    Job("multiturn", (*_MULTITURN, "--arms", "hicache,native,simple,none", "--out", "OUT"), 900),
    Job("multiturn-lmcache", (*_MULTITURN, "--arms", "lmcache", "--out", "OUT"), 500),
    Job(
        "restore-async",
        (
            *_RESTORE,
            "--host-memory",
            "28GiB",
            "--storage",
            "none",
            "--repeat",
            "5",
            "--vs",
            "native,simple",
            "--out",
            "OUT",
        ),
        700,
    ),
    Job(
        "restore-layerwise",
        (
            *_RESTORE,
            "--host-memory",
            "28GiB",
            "--storage",
            "none",
            "--repeat",
            "5",
            "--load-mode",
            "layerwise",
            "--out",
            "OUT",
        ),
        400,
    ),
    Job("overlap", ("benchmarks/overlap.py", *_LLAMA, "--out", "OUT"), 300),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a job."""

    name: str
    gpu: str
    seconds: float
    result: str
    """"passed", "failed (STATUS)" or "out of time"."""


class Suite:
    """Jobs that wait, those that ran, and where it is written down."""

    def __init__(self, out: Path, jobs: list[Job]) -> None:
        self._out = out
        self._lock = threading.Lock()
        out.mkdir(parents=True, exist_ok=True)
        self._status = out / STATUS
        rows = json.loads(self._status.read_text()) if self._status.exists() else []
        self.ended = [Ended(**row) for row in rows if row["result"] == "passed"]
        done = {job.name for job in self.ended}
        self._waiting = deque(job for job in jobs if job.name not in done)

    def run_all(self, gpus: list[str]) -> bool:
        """Run what waits; whether every job has passed."""
        threads = [threading.Thread(target=self._serve, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return all(job.result == "passed" for job in self.ended)

    def _serve(self, gpu: str) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            ended = self._run(job, gpu)
            with self._lock:
                self.ended.append(ended)
                rows = [{name: getattr(e, name) for name in Ended.__slots__} for e in self.ended]
                self._status.write_text(json.dumps(rows, indent=1))
            print(f"{ended.name}: {ended.result} after {ended.seconds:.0f} s", flush=True)

    def _run(self, job: Job, gpu: str) -> Ended:
        folder = (self._out / job.name).resolve()
        folder.mkdir(exist_ok=True)
        arguments = [word.replace("OUT", str(folder), 1) for word in job.arguments]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONSAFEPATH": "1"}
        started = time.monotonic()
        with open(self._out / f"{job.name}.log", "wb") as log:
            try:
                status = subprocess.run(
                    [sys.executable, "-P", *arguments],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=job.limit_s,
                    check=False,
                ).returncode
                result = "passed" if status == 0 else f"failed ({status})"
            except subprocess.TimeoutExpired:
                result = "out of time"
        return Ended(job.name, gpu, round(time.monotonic() - started, 1), result)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", help="names of jobs, with commas")
    add("--gpus", default="0", help="numbers of GPUs, with commas")
    add("--out", type=Path, default=Path("results"), help="folder for logs and results")
    add("--list", action="store_true", help="show the jobs and run none")
    return parser.parse_args(arguments)


def chosen_jobs(names: str | None) -> list[Job]:
    """The jobs of these names, in the order of ``JOBS``; exits where one is unknown."""
    if names is None:
        return list(JOBS)
    wanted = {name for name in names.split(",") if name}
    unknown = wanted - {job.name for job in JOBS}
    if unknown or not wanted:
        known = ", ".join(job.name for job in JOBS)
        sys.exit(f"--only takes {known}, got {names!r}")
    return [job for job in JOBS if job.name in wanted]


def main(arguments: list[str] | None = None) -> int:
    """Run the suite; 1 when a job failed."""
    options = parse_options(arguments)
    jobs = chosen_jobs(options.only)
    if options.list:
        print(table(("job", "limit s"), [(job.name, str(job.limit_s)) for job in jobs]))
        return 0
    suite = Suite(options.out, jobs)
    has_passed = suite.run_all(options.gpus.split(","))
    rows = [(e.name, e.gpu, f"{e.seconds:.0f}", e.result) for e in suite.ended]
    print(table(("job", "GPU", "s", "result"), rows))
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
