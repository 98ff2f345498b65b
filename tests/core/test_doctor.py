"""``hicache doctor`` without a model: what it looks at, what it says, and its exit status."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
from sample_namespace import SAMPLE

from vllm_hicache import __version__, doctor_host
from vllm_hicache.cli import main
from vllm_hicache.config import HiCacheConfig
from vllm_hicache.doctor_report import DoctorReport
from vllm_hicache.namespace_records import encode_record
from vllm_hicache.testing import MemoryBackend

SECRET = "sesame-4711"
HOST = {"host_memory": "16MiB"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("HICACHE_"):
            monkeypatch.delenv(name)


def transfer(**options):
    return json.dumps({"kv_connector_extra_config": HOST | options})


def doctor(capsys, *arguments):
    """Exit status and what was printed as JSON."""
    status = main(["doctor", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def check_of(found, name):
    (check,) = [check for check in found["checks"] if check["name"] == name]
    return check


def test_a_sound_folder_passes_and_nothing_is_left_in_it(capsys, tmp_path):
    status, found = doctor(capsys, "--kv-transfer-config", transfer(storage=f"file://{tmp_path}/s"))
    assert (status, found["ok"]) == (0, True)
    assert check_of(found, "storage probe")["status"] == "ok"
    assert set(found["storage"]["probe_ms"]) == {"write", "exists", "read", "delete"}
    assert found["storage"]["room"]["free_bytes"] > 0
    assert list((tmp_path / "s").rglob("*_L*")) == []
    assert found["stored_namespaces"] == []
    assert found["versions"]["vllm-hicache"] == __version__
    assert found["host"]["available_bytes"] > 0


def test_the_text_names_every_check_and_its_advice(capsys, tmp_path):
    storage = {"url": f"file://{tmp_path}", "capacity": "1MB"}
    status = main(["doctor", "--kv-transfer-config", transfer(storage=storage, min_object_bytes=1)])
    text = capsys.readouterr().out
    assert status == 1
    assert "FAILED storage probe: the store takes no writes now" in text
    assert "-> make room" in text
    assert "ok     configuration: 4 option(s) given, all understood" in text


def test_an_option_is_told_with_the_place_that_gave_it(capsys, tmp_path, monkeypatch):
    file = tmp_path / "hicache.yaml"
    file.write_text("page_size: 64\n")
    monkeypatch.setenv("HICACHE_EVICTION", "lfu")
    status, found = doctor(capsys, "--kv-transfer-config", transfer(config_file=str(file)))
    assert status == 0
    assert found["configuration"]["page_size"] == 64
    assert found["given_by"] == {
        "config_file": "kv_connector_extra_config",
        "eviction": "HICACHE_EVICTION",
        "host_memory": "kv_connector_extra_config",
        "page_size": f"page_size in {file}",
    }


def test_no_secret_is_shown(capsys, tmp_path):
    storage = {"url": f"redis://user:{SECRET}@127.0.0.1:1/0", "connect_timeout_s": "100ms"}
    status = main(["doctor", "--kv-transfer-config", transfer(storage=storage)])
    output = capsys.readouterr()
    assert status == 1
    assert "FAILED storage: cannot be opened" in output.out
    assert SECRET not in output.out + output.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"page_sise": 64}, 'did you mean "page_size"'),
        ({"page_size": 0}, "page_size must be"),
        ({"storage": {"url": "file:///x", "capacty": "1GB"}}, 'did you mean "capacity"'),
    ],
)
def test_a_configuration_that_cannot_be_is_status_2(capsys, options, said):
    status, found = doctor(capsys, "--kv-transfer-config", transfer(**options))
    assert status == 2
    check = check_of(found, "configuration")
    assert check["status"] == "refused"
    assert said in check["found"]
    assert check["advice"]


def test_a_scheme_that_nobody_knows_is_status_2(capsys):
    status, found = doctor(capsys, "--kv-transfer-config", transfer(storage="ftp://host"))
    assert status == 2
    assert "known are file://" in check_of(found, "storage")["found"]


def test_a_file_where_the_folder_should_be_is_status_2(capsys, tmp_path):
    (tmp_path / "s").write_text("not a folder")
    status, found = doctor(capsys, "--kv-transfer-config", transfer(storage=f"file://{tmp_path}/s"))
    assert status == 2
    assert "must be a directory" in check_of(found, "storage")["found"]


def test_without_storage_all_is_well(capsys):
    status, found = doctor(capsys, "--kv-transfer-config", transfer())
    assert status == 0
    assert check_of(found, "storage")["status"] == "note"


@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor", "--kv-transfer-config", "{"],
        ["doctor", "--kv-transfer-config", "[]"],
        ["what"],
        [],
    ],
)
def test_a_wrong_command_line_is_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


def test_arguments_of_vllm_need_a_model(capsys):
    assert main(["doctor", "--tensor-parallel-size", "2"]) == 2
    assert "need --model" in capsys.readouterr().err


def test_memory_that_is_not_there_fails_with_the_numbers():
    report = DoctorReport()
    config = HiCacheConfig.parse({"host_memory": "900TiB"}, env={})
    doctor_host.check_memory(report, config, num_workers=2)
    (check,) = [check for check in report.checks if check.name == "host memory"]
    assert check.status == "failed"
    assert "900" in check.found
    assert check.advice
    assert report.exit_status == 1


def test_a_missing_entry_point_fails(monkeypatch):
    monkeypatch.setattr(doctor_host, "entry_points", lambda **_: ())
    report = DoctorReport()
    doctor_host.check_entry_point(report)
    assert report.exit_status == 1


def test_an_entry_point_that_a_variable_leaves_out_fails(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    report = DoctorReport()
    doctor_host.check_entry_point(report)
    assert "VLLM_PLUGINS" in report.checks[0].found
    monkeypatch.setenv("VLLM_PLUGINS", "other,hicache")
    doctor_host.check_entry_point(report)
    assert report.checks[1].status == "ok"


class LyingBackend(MemoryBackend):
    """Keeps headers and spoils payloads."""

    async def read(self, reads):
        outcomes = await super().read(reads)
        for read in reads:
            read.payload[0] ^= 1
        return outcomes


LIAR = f"plugin://{__name__.replace('.', '_')}/LyingBackend"


def test_a_store_that_spoils_bytes_fails(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, LIAR.split("/")[2], sys.modules[__name__])
    LyingBackend.room = None  # neither room nor records
    status, found = doctor(capsys, "--kv-transfer-config", transfer(storage=LIAR))
    assert status == 1
    assert (
        check_of(found, "storage probe")["found"] == "the object that was written reads as corrupt"
    )


def test_namespaces_of_the_store_are_listed(capsys, tmp_path):
    namespace = SAMPLE
    folder = tmp_path / "namespaces"
    folder.mkdir()
    (folder / f"{namespace.digest}.json").write_bytes(encode_record(namespace))
    (folder / "hc1-0123456789abcdef.json").write_bytes(encode_record(namespace))  # a forgery
    _, found = doctor(capsys, "--kv-transfer-config", transfer(storage=f"file://{tmp_path}"))
    (listed,) = found["stored_namespaces"]
    assert listed["namespace"] == namespace.digest
    assert listed["page_size"] == 64


def test_the_command_is_installed_with_the_package():
    (script,) = metadata.entry_points(group="console_scripts", name="hicache")
    assert script.load() is main


def test_help_and_version_load_nothing_heavy():
    program = (
        "import sys\nfrom vllm_hicache.cli import main\n"
        "try: main(['doctor', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'vllm', 'redis', 'aiobotocore'} & sys.modules.keys()))"
    )
    command = [sys.executable, "-P", "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
    assert "Exit status" in run.stdout
