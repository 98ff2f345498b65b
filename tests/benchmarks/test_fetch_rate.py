"""The benchmark of a storage process's fetches, once, with small pages."""

import json

import pytest

from vllm_hicache.benchmarks import fetch_rate

pytestmark = pytest.mark.services


@pytest.mark.parametrize("more", [[], ["--used-slots", "--drop-page-cache"]])
def test_a_fetch_is_measured_beside_plain_reads_and_its_bytes_are_checked(more, tmp_path, capsys):
    sizes = ["--page-mib", "1", "--pages", "6", "--rounds", "2"]
    fetch_rate.main([str(tmp_path / "pages"), *sizes, "--out", str(tmp_path), *more])
    record = json.loads((tmp_path / "fetch_rate.json").read_text())
    assert [len(found) for found in record["gb_per_s"].values()] == [2, 2]
    assert record["share"] > 0
    assert (record["page_mib"], record["pages"]) == (1, 6)
    assert record["used_slots"] is bool(more)
    assert "of the plain reads" in capsys.readouterr().out
    assert not (tmp_path / "pages").exists()


def test_a_page_that_is_not_what_was_stored_ends_it(tmp_path, monkeypatch):
    right = fetch_rate.FetchRig.fetch_s

    def fetch_and_spoil(rig, first_slot):
        seconds = right(rig, first_slot)
        rig._pool.tensors[0][first_slot + 1, 5] = 0
        return seconds

    monkeypatch.setattr(fetch_rate.FetchRig, "fetch_s", fetch_and_spoil)
    with pytest.raises(SystemExit, match="page 1 has other bytes"):
        fetch_rate.main([str(tmp_path / "pages"), "--page-mib", "1", "--pages", "2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--pages", "0"], "--pages must be 1 or more"), ([], "exists")],
)
def test_wrong_options_are_refused(arguments, message, tmp_path, capsys):
    folder = tmp_path if not arguments else tmp_path / "new"
    with pytest.raises(SystemExit) as caught:
        fetch_rate.main([str(folder), *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
