"""The storage of running storage processes is attached, detached, replaced and shown."""

import json
import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from vllm_hicache import cli
from vllm_hicache.config import StorageConfig
from vllm_hicache.control_address import ControlAddress
from vllm_hicache.control_server import ControlServer
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_channel import ChannelDown, ChannelUp
from vllm_hicache.storage_control import StorageControl
from vllm_hicache.storage_messages import ExistsResult, FetchProgress, PersistReleased, Switching
from vllm_hicache.testing import Fault

pytestmark = pytest.mark.services

TOKEN = "sixteen characters"


def folder(path: Path, **options) -> StorageConfig:
    return StorageConfig.parse({"url": f"file://{path}", **options})


def switched(engine, incarnation: int, attachment: int) -> None:
    engine.wait_for(Switching())
    engine.wait_for(ChannelDown())
    engine.wait_for(ChannelUp(incarnation, attachment))


def num_found(engine, op: int, pages) -> ExistsResult:
    engine.exists(op, pages)
    return engine.wait_for(ExistsResult)


# Storage processes ------------------------------------------------------------------------------


def test_status_says_what_is_served(engine):
    engine.persisted(1, range(3))
    (standing,) = StorageControl([engine.address]).status()
    assert standing.url.startswith("plugin://")
    assert (standing.incarnation, standing.attachment, standing.is_open) == (1, 1, True)
    assert standing.pid == engine.process.pid
    assert standing.counters["objects_written"] == 6


def test_another_storage_is_served_and_the_former_one_keeps_its_pages(engine, tmp_path):
    engine.persisted(1, range(3))
    control = StorageControl([engine.address])
    assert control.attach(folder(tmp_path / "other")) == ""
    switched(engine, 2, 2)
    assert num_found(engine, 2, range(3)) == ExistsResult(2, 0, ok=True)
    assert engine.persisted(3, range(5)).num_stored == 5
    assert num_found(engine, 4, range(5)) == ExistsResult(4, 5, ok=True)
    former = StorageConfig.parse({"url": f"file://{tmp_path}/store"})
    assert control.attach(former) == ""
    switched(engine, 3, 3)
    assert num_found(engine, 5, range(5)) == ExistsResult(5, 3, ok=True)


def test_detached_storage_answers_nothing_until_one_is_attached_again(engine, tmp_path):
    engine.persisted(1, range(3))
    control = StorageControl([engine.address])
    assert control.detach() == ""
    switched(engine, 2, 0)
    (standing,) = control.status()
    assert (standing.url, standing.attachment, standing.is_open) == ("", 0, False)
    assert standing.counters["storage_attached"] == standing.counters["breaker_open"] == 0
    assert num_found(engine, 2, range(3)).reason == "unavailable"
    assert engine.persisted(3, range(3)).num_dropped == 3
    assert control.attach(folder(tmp_path / "store")) == ""
    switched(engine, 3, 3)
    assert num_found(engine, 4, range(3)) == ExistsResult(4, 3, ok=True)


def test_detaching_what_is_detached_succeeds_and_nothing_is_written_until_it_is_attached(
    engine, tmp_path
):
    store = folder(tmp_path / "store")
    control = StorageControl([engine.address])
    for incarnation in (2, 3):
        assert control.detach() == ""
        switched(engine, incarnation, 0)
        assert engine.persisted(10 * incarnation, range(3)).num_dropped == 3
        (standing,) = control.status()
        assert (standing.url, standing.is_open) == ("", False)
    assert engine.num_objects() == 0
    assert control.attach(store) == ""
    switched(engine, 4, 4)
    assert engine.persisted(50, range(3)).num_stored == 3
    assert engine.num_objects() == 6


def test_what_was_accepted_is_written_before_the_change(engine, tmp_path, wait_until):
    engine.faults.write(Fault(operation="write", delay_s=0.05))
    engine.persist(1, range(20))
    assert StorageControl([engine.address]).attach(folder(tmp_path / "other")) == ""
    engine.wait_for(PersistReleased(1))
    assert engine.num_objects() == 40


def test_a_storage_that_cannot_be_opened_changes_nothing(engine, tmp_path):
    (tmp_path / "file").write_text("")
    control = StorageControl([engine.address])
    assert "must be a directory" in control.attach(folder(tmp_path / "file"))
    away = StorageConfig.parse({"url": "redis://:secret@127.0.0.1:1/0", "connect_timeout_s": 0.5})
    problem = control.attach(away)
    assert problem.startswith("nothing was changed: worker 0: ")
    assert "secret" not in problem
    assert engine.persisted(1, range(2)).num_stored == 2
    assert ChannelDown() not in engine.seen


def test_calls_that_hang_in_the_former_storage_do_not_keep_it(new_engine, tmp_path):
    engine = new_engine(shutdown_grace_s=0.3)
    engine.start()
    engine.persisted(1, range(4))
    engine.faults.write(Fault(operation="read", name=engine.name_of(2), hangs=True))
    engine.fetch(2, range(4))
    engine.wait_for(FetchProgress)
    assert StorageControl([engine.address]).attach(folder(tmp_path / "other")) == ""
    switched(engine, 2, 2)
    assert engine.persisted(3, range(4)).num_stored == 4


def test_a_killed_process_comes_back_with_the_storage_that_was_attached_last(engine, tmp_path):
    control = StorageControl([engine.address])
    assert control.attach(folder(tmp_path / "other")) == ""
    switched(engine, 2, 2)
    engine.persisted(1, range(3))
    os.kill(engine.process.pid, signal.SIGKILL)
    engine.wait_for(ChannelDown())
    engine.wait_for(ChannelUp(3, 2))
    assert num_found(engine, 2, range(3)) == ExistsResult(2, 3, ok=True)


def test_no_worker_changes_when_one_cannot(make_engine, tmp_path):
    engine = make_engine()
    gone = "unix:@hicache-nobody#token"
    problem = StorageControl([engine.address, gone]).attach(folder(tmp_path / "other"))
    assert "nothing was changed" in problem
    assert "worker 1: its storage process cannot be reached" in problem
    assert engine.persisted(1, range(2)).num_stored == 2


def test_who_lacks_the_token_of_the_process_changes_nothing(engine):
    address, _, _ = engine.address.partition("#")
    (answer,) = StorageControl([f"{address}#wrong"]).status()
    assert "closed the connection" in answer or "cannot be reached" in answer
    assert "did not change" in StorageControl([f"{address}#wrong"]).detach()
    assert engine.persisted(1, range(2)).num_stored == 2


# The command ------------------------------------------------------------------------------------


@pytest.fixture
def served(engine, tmp_path, monkeypatch):
    """An engine that takes commands; the environment says where and with which token."""
    address = ControlAddress.parse(f"unix:{tmp_path}/control.sock")
    server = ControlServer(address, TOKEN, StorageControl([engine.address]))
    monkeypatch.setenv("HICACHE_CONTROL_ADDRESS", str(address))
    monkeypatch.setenv("HICACHE_CONTROL_TOKEN", TOKEN)
    yield engine
    server.close()
    assert not Path(address.path).exists()


def test_the_command_attaches_shows_and_detaches(served, tmp_path, capsys):
    options = tmp_path / "options.yaml"
    options.write_text("integrity_key: a key that nobody may read\n")
    attach = ["storage", "attach", "--url", f"file://{tmp_path}/other", "--options", str(options)]
    assert cli.main([*attach, "--set", "capacity=1GB"]) == 0
    assert f"worker 0: file://{tmp_path}/other open, breaker closed" in capsys.readouterr().out
    switched(served, 2, 2)
    served.persisted(1, range(2))
    assert cli.main(["storage", "status", "--json"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["workers"][0]["counters"]["objects_written"] == 4
    assert "nobody may read" not in out
    assert cli.main(["storage", "detach"]) == 0
    assert capsys.readouterr().out == "worker 0: no storage attached\n"


def test_a_refused_storage_is_an_error_that_names_its_reason(served, tmp_path, capsys):
    assert cli.main(["storage", "attach", "--url", "s4://bucket"]) == 1
    assert "scheme 's4' is unknown" in capsys.readouterr().err
    bad = ["storage", "attach", "--url", f"file://{tmp_path}/x", "--set", "capacitty=1GB"]
    assert cli.main(bad) == 1
    assert "capacitty" in capsys.readouterr().err
    assert cli.main(["storage", "attach", "--url", "redis://:pw0rd@127.0.0.1:1/0"]) == 1
    assert "pw0rd" not in "".join(capsys.readouterr())


def test_a_wrong_token_is_refused(served, tmp_path, capsys, monkeypatch):
    token = tmp_path / "token"
    token.write_text("another of sixteen\n")
    assert cli.main(["storage", "detach", "--token-file", str(token)]) == 1
    assert "not the control_token" in capsys.readouterr().err
    token.write_text(TOKEN + "\n")
    monkeypatch.delenv("HICACHE_CONTROL_TOKEN")
    assert cli.main(["storage", "status", "--token-file", str(token)]) == 0
    assert cli.main(["storage", "status"]) == 2
    assert "HICACHE_CONTROL_TOKEN" in capsys.readouterr().err


def test_lines_that_are_no_command_are_refused_and_the_next_one_is_served(served, capsys):
    address = ControlAddress.parse(os.environ["HICACHE_CONTROL_ADDRESS"])
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"{}\n", b'{"token": 3}\n'):
        with address.connect(5) as connection:
            connection.sendall(line)
            assert b"error" in connection.recv(4096)
    known = json.dumps({"token": TOKEN, "command": "flush"}).encode() + b"\n"
    with address.connect(5) as connection:
        connection.sendall(known)
        assert b"status, attach or detach" in connection.recv(4096)
    assert cli.main(["storage", "status"]) == 0


def test_nobody_listens_is_said_with_what_to_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HICACHE_CONTROL_TOKEN", TOKEN)
    assert cli.main(["storage", "status", "--server", f"unix:{tmp_path}/none"]) == 2
    assert "control_address and control_token" in capsys.readouterr().err
    assert cli.main(["storage", "status", "--server", "tcp:0.0.0.0:1"]) == 2
    assert "must not cross a network" in capsys.readouterr().err


# The address ------------------------------------------------------------------------------------


def test_the_socket_is_for_its_owner_alone_and_a_dead_one_is_replaced(tmp_path):
    address = ControlAddress.parse(f"unix:{tmp_path}/control.sock")
    listener = address.listen()
    assert Path(address.path).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot be listened at: Address already in use"):
        address.listen()
    listener.close()  # as after a kill: its file stays
    address.listen().close()


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ControlAddress.parse(f"tcp:127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="give a free one"):
            address.listen()


def test_a_server_that_closes_leaves_no_thread(tmp_path):
    address = ControlAddress.parse("tcp:127.0.0.1:" + str(_free_port()))
    server = ControlServer(address, TOKEN, StorageControl([]))
    server.close()
    server.close()
    assert not [t for t in threading.enumerate() if t.name == "hicache-control"]
    with pytest.raises(ConnectionRefusedError):
        address.connect(1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
