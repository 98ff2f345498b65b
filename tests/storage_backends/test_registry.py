"""A storage URL names a backend, or the start is refused with what is allowed."""

from pathlib import Path

import pytest

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage import WriteOutcome
from vllm_hicache.storage_backends.conformance import object_write
from vllm_hicache.storage_backends.registry import folder_of, open_backend


def storage_config(url: str):
    config = HiCacheConfig.parse({"storage": {"url": url, "min_free": 0}}, {})
    assert config.storage is not None
    return config.storage


async def test_file_url_opens_the_folder_it_names(tmp_path):
    url = f"file://{tmp_path}/a%20folder"
    backend = open_backend(url, storage_config(url))
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
