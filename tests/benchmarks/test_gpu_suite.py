"""The suite of a GPU host: its jobs are commands that exist, and it goes on where it stopped."""

import importlib
import json

import pytest

from vllm_hicache.benchmarks import gpu_suite
from vllm_hicache.benchmarks.command import parser_of
from vllm_hicache.benchmarks.gpu_suite import JOBS, ROOT, STATUS, Job, main


def _commands(kind: str) -> list[Job]:
    return [job for job in JOBS if kind in job.arguments]


@pytest.mark.parametrize("job", _commands("bench"), ids=lambda job: job.name)
def test_every_benchmark_takes_the_arguments_of_its_job(job, tmp_path):
    arguments = [word.replace("OUT", str(tmp_path), 1) for word in job.arguments]
    start = arguments.index("bench") + 1
    options = parser_of(arguments[start]).parse_args(arguments[start + 1 :])
    assert options.out == tmp_path
    assert options.shape == "llama-8b"


@pytest.mark.vllm
@pytest.mark.parametrize(
    "job", [job for job in JOBS if job.arguments[0].endswith(".py")], ids=lambda job: job.name
)
def test_every_script_takes_the_arguments_of_its_job(job, tmp_path):
    script, *arguments = [word.replace("OUT", str(tmp_path), 1) for word in job.arguments]
    assert (ROOT / script).exists()
    name = script.removeprefix("benchmarks/").removesuffix(".py")
    importlib.import_module(f"vllm_hicache.benchmarks.{name}").parse_options(arguments)


def test_jobs_have_names_of_their_own_and_limits_of_at_most_fifteen_minutes():
    assert len({job.name for job in JOBS}) == len(JOBS)
    assert all(0 < job.limit_s <= 900 for job in JOBS)


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Three jobs in place of the real ones: one notes its GPU, one fails, one does not end."""
    note = (
        "import os, sys; open(sys.argv[1] + '/gpu', 'a').write(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    made = (
        Job("notes", ("-c", note, "OUT"), 60),
        Job("fails", ("-c", "raise SystemExit(3)"), 60),
        Job("hangs", ("-c", "import time; time.sleep(600)"), 1),
    )
    monkeypatch.setattr(gpu_suite, "JOBS", made)
    return made


@pytest.mark.usefixtures("jobs")
def test_a_job_that_failed_or_ran_out_of_time_is_told_and_run_again_and_others_are_not(
    tmp_path, capsys
):
    assert main(["--out", str(tmp_path), "--gpus", "5"]) == 1
    rows = {row["name"]: row["result"] for row in json.loads((tmp_path / STATUS).read_text())}
    assert rows == {"notes": "passed", "fails": "failed (3)", "hangs": "out of time"}
    assert (tmp_path / "notes" / "gpu").read_text() == "5"
    capsys.readouterr()
    assert main(["--out", str(tmp_path), "--only", "notes,fails", "--gpus", "5,6"]) == 1
    assert (tmp_path / "notes" / "gpu").read_text() == "5", "it was not run again"
    assert "fails: failed (3)" in capsys.readouterr().out
    assert main(["--out", str(tmp_path), "--only", "notes"]) == 0


@pytest.mark.usefixtures("jobs")
@pytest.mark.parametrize("names", ["note", "notes,fail", ","])
def test_an_unknown_job_is_refused_with_those_that_there_are(names, tmp_path):
    with pytest.raises(SystemExit, match=r"--only takes notes, fails, hangs, got '"):
        main(["--out", str(tmp_path), "--only", names])


def test_the_list_names_all_jobs(capsys):
    assert main(["--list"]) == 0
    told = capsys.readouterr().out
    assert all(job.name in told for job in JOBS)
