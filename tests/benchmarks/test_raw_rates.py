"""What the machine itself can do is measured on real files and a real device."""

import pytest

from vllm_hicache.benchmarks import raw_rates, restore
from vllm_hicache.benchmarks.raw_rates import file_read_gb_per_s, pinned_copy_gb_per_s


@pytest.fixture
def read_calls(monkeypatch):
    calls = []
    preadv = raw_rates.os.preadv

    def counted(fd, buffers, offset):
        calls.append((preadv(fd, buffers, offset), bytes(buffers[0][:4])))
        return calls[-1][0]

    monkeypatch.setattr(raw_rates.os, "preadv", counted)
    return calls


@pytest.mark.parametrize("drops", [False, True])
def test_every_file_is_read_whole_once(tmp_path, read_calls, monkeypatch, drops):
    monkeypatch.setattr(raw_rates, "_POOL_BYTES", 16 * 5000)
    sizes = [100 + 37 * i for i in range(40)]
    for number, size in enumerate(sizes):
        path = tmp_path / str(number % 3) / f"{number:03d}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(number.to_bytes(4, "big") * size)
    assert file_read_gb_per_s(tmp_path, drops_page_cache=drops) > 0
    expected = [(4 * size, number.to_bytes(4, "big")) for number, size in enumerate(sizes)]
    assert sorted(read_calls) == sorted(expected)


def test_no_more_is_read_than_the_limit_and_at_least_one_file(tmp_path, read_calls, monkeypatch):
    monkeypatch.setattr(raw_rates, "_POOL_BYTES", 1 << 16)
    for name in "abc":
        (tmp_path / name).write_bytes(bytes(1000))
    monkeypatch.setattr(raw_rates, "READ_BYTES", 2500)
    file_read_gb_per_s(tmp_path, drops_page_cache=False)
    assert len(read_calls) == 2
    monkeypatch.setattr(raw_rates, "READ_BYTES", 10)
    file_read_gb_per_s(tmp_path, drops_page_cache=False)
    assert len(read_calls) == 3


def test_without_files_there_is_no_rate(tmp_path):
    assert file_read_gb_per_s(tmp_path, drops_page_cache=False) is None
    assert restore.raw_line({}) == "The machine itself, in this run: not measured."


@pytest.mark.gpu
def test_pinned_copies_have_a_rate():
    assert pinned_copy_gb_per_s() > 1
