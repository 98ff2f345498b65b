"""What the S3 backend is made of: addresses, places for requests, bodies of uploads."""

import asyncio
import sys

import pytest

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.storage_backends.registry import open_backend
from vllm_hicache.storage_backends.s3_client import S3Address
from vllm_hicache.storage_backends.s3_requests import Places, UploadBody, all_results

NAME = "ab" * 32 + "_hc1-0123456789abcdef_L0-8_H0"


@pytest.mark.parametrize(
    ("url", "prefix", "style"),
    [
        ("s3://bucket", "", "auto"),
        ("s3://bucket/", "", "auto"),
        ("s3://bucket/a/b%20c".replace("%20", "-"), "a/b-c/", "auto"),
        ("s3://bucket/a?path_style=true", "a/", "path"),
        ("s3://bucket?path_style=false&region=eu-north-1", "", "virtual"),
    ],
)
def test_address_of_a_url(url, prefix, style):
    address = S3Address.parse(url)
    assert (address.bucket, address.prefix, address.addressing_style) == ("bucket", prefix, style)
    assert address.key(NAME) == f"{prefix}hc1-0123456789abcdef/ab/{NAME}"


def test_address_names_region_and_server():
    address = S3Address.parse("s3://bucket?endpoint_url=https%3A%2F%2Fminio%3A9000&region=r1")
    assert (address.endpoint_url, address.region) == ("https://minio:9000", "r1")
    plain = S3Address.parse("s3://bucket")
    assert (plain.endpoint_url, plain.region) == (None, None)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://", "got bucket ''"),
        ("s3:///prefix", "got bucket ''"),
        ("s3://b/prefix", "got bucket 'b'"),
        ("s3://bucket/a#b", "an S3 storage URL must be s3://BUCKET/PREFIX"),
        ("s3://bucket/a//b", "no empty part"),
        ("s3://bucket/a%00", "the prefix of an S3 storage URL may hold"),
        ("s3://bucket?path_style=maybe", "path_style of an S3 storage URL must be true or false"),
        ("s3://bucket?endpoint_url=minio:9000", "endpoint_url of an S3 storage URL must be http"),
        ("s3://bucket?endpoint=x", "got endpoint; credentials come from"),
    ],
)
def test_address_of_another_form_is_refused(url, reason):
    with pytest.raises(ConfigError) as refusal:
        S3Address.parse(url)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:swordfish@bucket/a",
        "s3://bucket?secret_access_key=swordfish",
        "s3://bucket?endpoint_url=https://user:swordfish@minio",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(url):
    with pytest.raises(ConfigError) as refusal:
        S3Address.parse(url)
    assert "swordfish" not in str(refusal.value)


def test_key_of_what_is_no_object_is_refused():
    with pytest.raises(ValueError, match="is not the name of an object"):
        S3Address.parse("s3://bucket").key("../../etc/passwd")


def test_missing_package_is_told_with_the_extra_that_brings_it(monkeypatch):
    for module in ("aiobotocore", "aiobotocore.config"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("s3", "s3_client"):
        monkeypatch.delitem(sys.modules, f"vllm_hicache.storage_backends.{module}", raising=False)
    config = HiCacheConfig.parse({"storage": "s3://bucket"}, {}).storage
    with pytest.raises(ConfigError, match=r"pip install 'vllm-hicache\[s3\]'"):
        open_backend(config.url, config)


async def test_places_are_held_one_by_one_and_given_back():
    places = Places(1, hung_after_s=60)
    order = []

    async def request(number):
        async with places.taken():
            order.append(number)
            await asyncio.sleep(0)
            order.append(number)

    await asyncio.gather(*(request(number) for number in range(3)))
    assert order == [0, 0, 1, 1, 2, 2]
    assert places.oldest_running_s() == 0.0


async def test_hung_requests_give_away_as_many_places_as_there_are():
    places = Places(2, hung_after_s=0.01)
    release = asyncio.Event()
    num_running = 0

    async def request():
        nonlocal num_running
        async with places.taken():
            num_running += 1
            await release.wait()

    requests = [asyncio.ensure_future(request()) for _ in range(6)]
    await asyncio.sleep(0.1)
    assert (num_running, places.num_hung()) == (4, 2)
    assert places.oldest_running_s() >= 0.09
    release.set()
    await asyncio.gather(*requests)
    assert (num_running, places.num_hung(), places.oldest_running_s()) == (6, 0, 0.0)


async def test_first_failure_ends_all_before_it_is_raised():
    ended = []

    async def work(number):
        try:
            await asyncio.sleep(0 if number == 1 else 60)
            raise ConnectionResetError(str(number))
        finally:
            ended.append(number)

    with pytest.raises(ConnectionResetError, match="1"):
        await all_results([work(number) for number in range(3)])
    assert sorted(ended) == [0, 1, 2]
    assert await all_results([]) == []


def _body(num_bytes: int) -> UploadBody:
    whole = bytes(range(256)) * (num_bytes // 256)
    return UploadBody([memoryview(whole)[:100], memoryview(whole)[100:]])


async def test_body_yields_all_bytes_in_pieces():
    body = _body(1 << 20)
    pieces = [piece async for piece in body]
    assert b"".join(pieces) == bytes(range(256)) * 4096
    assert len(pieces) == 4
    assert [piece async for piece in body] == pieces


def test_body_is_a_file_that_can_be_read_again():
    body = _body(1024)
    assert len(body) == 1024
    assert body.read(300) + body.read(10_000) == body.read(0) + bytes(range(256)) * 4
    assert (body.read(), body.tell()) == (b"", 1024)
    assert body.seek(1000) == 1000
    assert body.read(-1) == (bytes(range(256)) * 4)[1000:]


async def test_body_that_was_released_fails_its_request():
    body = _body(1 << 20)
    pieces = aiter(body)
    await anext(pieces)
    body.release()
    with pytest.raises(ConnectionAbortedError):
        await anext(pieces)
