"""The benchmark of the host pool, once, with a small one."""

import json

import pytest


@pytest.mark.services
def test_a_pool_is_measured_in_a_process_of_its_own(tmp_path, capsys):
    from vllm_hicache.benchmarks import pin_pool

    pin_pool.main(["--gib", "0.125", "--threads", "2", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "pin_pool.json").read_text())["rows"]
    assert (row["gib"], row["threads"]) == (0.125, 2)
    assert 0 < row["first_s"] <= row["all_s"]
    assert 0.95 <= row["resident_ratio"] <= 1.1
    assert "resident / asked" in capsys.readouterr().out
