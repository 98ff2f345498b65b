"""A storage URL names a backend, or the start is refused with what is allowed."""

from pathlib import Path

import pytest

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import WriteOutcome
from vllm_hicache.storage_backends.conformance import object_write
from vllm_hicache.storage_backends.registry import ENTRY_POINTS, folder_of, open_backend


def storage_config(url: str, **options: object):
    config = HiCacheConfig.parse({"storage": {"url": url, **options}}, {})
    assert config.storage is not None
    return config.storage


async def test_file_url_opens_the_folder_it_names(tmp_path):
    url = f"file://{tmp_path}/a%20folder"
    backend = open_backend(url, storage_config(url, min_free=0))
    assert backend.name == "file"
    await backend.open()
    assert await backend.write([object_write(1, 10)]) == [WriteOutcome.STORED]
    await backend.close()
    assert (tmp_path / "a folder").is_dir()


def test_unknown_scheme_is_refused_with_the_known_ones(tmp_path):
    config = storage_config(f"file://{tmp_path}")
    with pytest.raises(ConfigError, match="'ftp' is unknown; known are file://"):
        open_backend("ftp://user:secret@host/x", config)


@pytest.mark.parametrize(
    "url",
    ["file://host/folder", "file:///a?b=1", "file:///a#b", "file://", "file:///", "file:relative"],
)
def test_file_url_that_names_no_local_folder_is_refused(url):
    with pytest.raises(ConfigError, match="a file storage URL must"):
        folder_of(url)


def test_localhost_is_this_machine():
    assert folder_of("file://localhost/var/cache") == Path("/var/cache")


@pytest.fixture
def offered_package(tmp_path, monkeypatch):
    """An installed package that offers a backend under a scheme, and one that is not whole."""
    (tmp_path / "shelf_storage.py").write_text(
        "class Shelf:\n"
        "    def __init__(self, url):\n"
        "        self.name = url\n"
        "    @classmethod\n"
        "    def from_url(cls, url, config):\n"
        "        return cls(url)\n"
    )
    information = tmp_path / "shelf_storage-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: shelf-storage\nVersion: 1.0\n"
    )
    (information / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\nshelf = shelf_storage:Shelf\nbroken = shelf_storage:Missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("offered_package")
def test_an_installed_package_offers_a_scheme():
    url = "shelf://north/3?room=a"
    assert open_backend(url, storage_config(url)).name == url


@pytest.mark.usefixtures("offered_package")
def test_a_package_that_lacks_what_it_offers_is_refused():
    url = "broken://north"
    with pytest.raises(ConfigError, match=r"offers broken:// cannot be imported: .*Missing"):
        open_backend(url, storage_config(url))


@pytest.mark.usefixtures("offered_package")
def test_offered_schemes_are_among_the_known_ones():
    url = "ftp://host"
    with pytest.raises(ConfigError, match=r"s3://, shelf://, unix://"):
        open_backend(url, storage_config(url))


def test_a_class_is_named_by_its_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "north_wing.py").write_text("from vllm_hicache.testing import MemoryBackend\n")
    config = storage_config("north_wing:MemoryBackend")
    assert open_backend(config.url, config).name == "memory"
    config = storage_config("north_wing:Missing")
    with pytest.raises(ConfigError, match="'Missing' of 'north_wing' cannot be imported: module"):
        open_backend(config.url, config)


def test_a_class_that_lacks_calls_is_refused_with_their_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "south_wing.py").write_text(
        "from vllm_hicache.storage_backends.blocking import BlockingBackend\n"
        "class Half(BlockingBackend):\n"
        "    def get(self, name): ...\n"
        "    def put(self, name, data): ...\n"
        "    def length(self, name): ...\n"
    )
    config = storage_config("south_wing:Half")
    with pytest.raises(ConfigError, match="'Half' of 'south_wing' lacks connect, names, remove"):
        open_backend(config.url, config)
