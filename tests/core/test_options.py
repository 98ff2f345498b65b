"""The table of options, and the document that describes it."""

import json
import re
import string
from pathlib import Path

import pytest
import yaml

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.errors import ConfigError
from vllm_hicache.option import Option
from vllm_hicache.options import ENV_NAMES, OPTIONS, STORAGE_OPTIONS, TOP_OPTIONS

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"
ENV_CHARACTERS = set(string.ascii_uppercase + string.digits + "_")


def test_variables_have_distinct_names():
    assert len(ENV_NAMES) == len(OPTIONS) + 1
    assert all(set(name) <= ENV_CHARACTERS for name in ENV_NAMES)


@pytest.mark.parametrize("name", OPTIONS)
def test_needs_name_options(name):
    assert {need.partition("=")[0] for need in OPTIONS[name].needs} <= set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_default_is_shown_as_it_may_be_given(name):
    option = OPTIONS[name]
    if option.default is not None:
        assert option.kind.parse(option.kind.show(option.default)) == option.default


def _row(option: Option) -> str:
    default = "unset" if option.default is None else _code(option.kind.show(option.default))
    cells = (
        f"`{option.name.rpartition('.')[2]}`",
        option.kind.name,
        "required" if option.name == "storage.url" else default,
        _code(option.example),
        f"`{option.env_name}`",
        option.doc,
    )
    return "| " + " | ".join(cells) + " |"


def _code(value: object) -> str:
    return f"`{json.dumps(value)}`"


def test_document_has_one_row_for_each_option_as_in_the_table():
    lines = DOCUMENT.read_text().splitlines()
    rows = [line for line in lines if re.match(r"\| `[a-z_0-9]+` \| ", line)]
    assert rows == [_row(option) for option in (*TOP_OPTIONS, *STORAGE_OPTIONS)]


def test_document_says_what_each_kind_takes():
    kinds = {option.kind.name for option in OPTIONS.values()}
    assert set(re.findall(r"^- \*\*(.*?)\*\*: ", DOCUMENT.read_text(), re.MULTILINE)) == kinds


def test_document_names_all_choices():
    text = DOCUMENT.read_text()
    for option in OPTIONS.values():
        if option.kind.name == "choice":
            assert f"`{option.name}` is {option.kind.allowed}" in text.replace("\n", " ")


def _blocks(language: str) -> list[str]:
    blocks = re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    if not blocks:
        pytest.fail(f"the document has no {language} block")
    return blocks


def test_examples_of_the_document_are_accepted():
    tables = [yaml.safe_load(block) for block in _blocks("yaml")]
    tables += [json.loads(block) for block in _blocks("json")]
    defaults = HiCacheConfig.parse({}, None)
    for table in tables:
        assert HiCacheConfig.parse(table, None) != defaults


def test_refusals_of_the_document_read_as_it_says():
    for block in _blocks("text"):
        given, _, message = block.strip().partition("\n")
        with pytest.raises(ConfigError) as refusal:
            HiCacheConfig.parse(json.loads(given), None)
        assert str(refusal.value) == message
