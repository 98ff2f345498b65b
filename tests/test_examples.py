"""The examples: the tiny model is whole and repeatable, the quickstart's checker can say no."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def _write_tiny_model(folder, *options):
    command = [sys.executable, EXAMPLES / "tiny_model.py", folder, *options]
    subprocess.run(command, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_equal_options_write_equal_models_and_a_seed_another(tmp_path):
    one = _write_tiny_model(tmp_path / "one")
    assert one.keys() == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert _write_tiny_model(tmp_path / "two") == one
    other = _write_tiny_model(tmp_path / "other", "--seed=1")
    assert other["model.safetensors"] != one["model.safetensors"]
    assert other["config.json"] == one["config.json"]
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two", "other"}


def test_sizes_of_the_tiny_model_are_options(tmp_path):
    files = _write_tiny_model(tmp_path / "model", "--num-layers=5", "--num-kv-heads=4")
    config = json.loads(files["config.json"])
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (5, 4)
    assert b"model.layers.4.self_attn.k_proj.weight" in files["model.safetensors"]


@pytest.fixture(scope="module")
def chat():
    specification = importlib.util.spec_from_file_location("chat", EXAMPLES / "quickstart_chat.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _turn(name="turn", *, device=0, host=0, disk=0, expected=None, token="a", logprob=-1.0):
    return {
        "name": name,
        "prompt_tokens": 1000,
        "ttft_s": 0.01,
        "text": token,
        "tokens": [[token, [97], logprob]],
        "tiers": {"device": device, "host": host, "disk": disk},
        "cached": device + host + disk,
        "expected": expected or {},
    }


COLD = {"device": 0, "host": 0, "disk": 0}


def _turns(*later):
    first = [_turn("turn 1", expected=COLD), _turn("turn 2", device=990, expected={"device": 500})]
    return [*first, *later]


def test_a_chat_with_its_hits_and_the_same_answers_has_no_problem(chat, capsys):
    host = _turn("host", host=960, expected={"host": 872}, logprob=-1.01)
    disk = _turn("disk", disk=960, expected={"disk": 872})
    assert chat.print_table(_turns(host, disk)) == []
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["-", "-", "yes", "yes"]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (_turn(host=800, expected={"host": 872}), "800 tokens from host, expected 872"),
        (_turn(disk=960, expected={"host": 872}), "0 tokens from host, expected 872"),
        (_turn(host=960, token="b"), "another answer"),
        (_turn(host=960, logprob=-1.5), "another answer"),
        (_turn(host=960) | {"tokens": []}, "another answer"),
        (_turn(host=960) | {"cached": 0}, "usage says 0 cached"),
        (_turn(host=64, expected=COLD), "64 tokens from host, expected none"),
    ],
)
def test_the_checker_names_what_is_wrong(chat, turn, problem):
    found = chat.print_table(_turns(turn))
    assert len(found) == 1
    assert problem in found[0]


def test_a_problem_is_the_exit_status(tmp_path):
    notes = tmp_path / "notes.json"
    command = [sys.executable, EXAMPLES / "quickstart_chat.py", "--notes", notes, "table"]
    notes.write_text(json.dumps(_turns(_turn(host=960, token="b"))))
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, "PROBLEM: turn: another answer" in run.stdout) == (1, True)


@pytest.fixture(scope="module")
def tiers(chat):
    sys.modules["quickstart_chat"] = chat
    specification = importlib.util.spec_from_file_location("tiers", EXAMPLES / "tier_chat.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    del sys.modules["quickstart_chat"]
    return module


def _moved(cold=None, deadline_s=0.0, **turn):
    return _turn(**turn) | {"cold": cold or _turn(), "engine": "TP2/PP1", "deadline_s": deadline_s}


def _restored(**turn):
    return _moved(**({"disk": 960, "expected": COLD | {"disk": 960}} | turn))


def test_a_moved_conversation_with_its_hits_has_no_problem(tiers, capsys):
    assert tiers.print_table([_moved(expected=COLD), _restored(logprob=-1.01)], "S3", 0.1) == []
    lines = capsys.readouterr().out.splitlines()
    assert "S3" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == ["yes", "yes"]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (_restored(disk=896), "896 tokens from disk, expected 960"),
        (_restored(host=64), "64 tokens from host, expected none"),
        (_restored(token="b"), "another answer"),
        (_restored(logprob=-1.2), "another answer"),
        (_restored(cold=_turn(device=64)), "64 tokens of the cold answer were cached"),
        (_restored() | {"cached": 0}, "usage says 0 cached"),
        (_moved(deadline_s=1.0) | {"ttft_s": 1.2}, "first token after 1.20 s, allowed are 1.01 s"),
    ],
)
def test_the_checker_of_a_moved_conversation_names_what_is_wrong(tiers, turn, problem):
    found = tiers.print_table([turn], "S3", 0.1)
    assert len(found) == 1
    assert problem in found[0]


def test_a_dead_store_may_be_waited_for_until_its_deadline(tiers):
    assert tiers.print_table([_moved(deadline_s=1.0) | {"ttft_s": 1.0}], "Redis", 0.1) == []


def test_a_turn_is_expected_where_its_predecessor_was_stored(tiers):
    turns = [_turn(), _turn() | {"prompt_tokens": 1100}]
    assert tiers.expected_tokens([], "none", is_repeated=False) == COLD
    assert tiers.expected_tokens(turns, "disk", is_repeated=False) == COLD | {"disk": 1088}
    assert tiers.expected_tokens(turns, "disk", is_repeated=True) == COLD | {"disk": 1024}


def _run_example(*command, **settings):
    environment = os.environ | {"VENV": sys.prefix, "NO_INSTALL": "1", **settings}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, stdin=DEVNULL
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def _table(output, first_column):
    """Engine, tokens by tier and verdict of each line of the table."""
    lines = [line for line in output.splitlines() if line.startswith(first_column)]
    return [line[34:].split() for line in lines]


@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_the_offline_engine_restores_from_files():
    command = (sys.executable, EXAMPLES / "offline_llm.py")
    lines = _run_example(*command, VLLM_ENABLE_V1_MULTIPROCESSING="0").splitlines()
    first, second = (line for line in lines if " engine: " in line)
    assert "'disk'" not in first
    assert "'disk'" in second
    assert "the same answers: True; restored: True" in lines


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.full
def test_the_offline_engine_restores_from_a_backend_of_ones_own(tmp_path):
    storage = f"custom_backend:SqliteBackend?file={tmp_path}/objects.db"
    command = [sys.executable, EXAMPLES / "offline_llm.py", "--storage", storage]
    path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    output = _run_example(*command, PYTHONPATH=path)
    assert "the same answers: True; restored: True" in output
    assert (tmp_path / "objects.db").stat().st_size > 1_000_000


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.full
def test_a_conversation_moves_from_tensor_to_pipeline_parallelism():
    _check_move(_run_example("bash", EXAMPLES / "s3_shared_cache.sh", TOPOLOGIES="2x1 1x2"), 2)


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.full
def test_a_conversation_moves_between_topologies_and_back():
    _check_move(_run_example("bash", EXAMPLES / "s3_shared_cache.sh"), 3)


def _check_move(output, num_engines):
    rows = _table(output, "turn ")[1:]
    assert len(rows) == num_engines
    assert {row[-1] for row in rows} == {"yes"}
    prompts = [int(row[1]) for row in rows]
    stored = [int(row[4]) for row in rows]
    assert stored[0] == 0
    for asked, found in zip(prompts, stored[1:], strict=False):  # an answer may complete a page
        assert found in (asked // 64 * 64, asked // 64 * 64 + 64)


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.full
def test_a_conversation_survives_host_memory_and_then_its_redis():
    output = _run_example("bash", EXAMPLES / "redis_tier.sh")
    rows = [row[:4] for row in _table(output, "turn ")[1:]]
    prompts = [int(row[0]) for row in rows]
    assert [int(row[3]) for row in rows] == [0, 0, prompts[1] // 64 * 64, 0]
    assert "objects in Redis, to live for" in output


@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.full
def test_the_quickstart_restores_from_host_and_file():
    assert _run_example("bash", EXAMPLES / "quickstart.sh").count("  yes") == 2
