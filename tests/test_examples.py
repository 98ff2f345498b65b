"""The examples: the tiny model is whole and repeatable, the quickstart's checker can say no."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.e2e
@pytest.mark.full
def test_the_quickstart_restores_from_host_and_file():
    environment = os.environ | {"VENV": sys.prefix, "NO_INSTALL": "1"}
    command = ["bash", EXAMPLES / "quickstart.sh"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("  yes") == 2
