"""Hides credentials in whatever is logged or raised: URLs, and values of secret options."""

import json
import re
from collections.abc import Mapping

MASK = "***"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_QUERY_SECRET = re.compile(
    r"([?&;][^=&;#\s]*(?:pass|pwd|secret|token|key|cred|auth|sig)[^=&;#\s]*=)[^&;#\s]*",
    re.IGNORECASE,
)
_MAX_SHOWN_CHARACTERS = 120


def mask_url(text: str) -> str:
    """The text with the credentials of any URL in it replaced by ``***``.

    >>> mask_url("redis://user:p@ss@cache:6379/0?db=1&password=x")
    'redis://***@cache:6379/0?db=1&password=***'
    >>> mask_url("file:///var/cache/a@b")
    'file:///var/cache/a@b'
    """
    head, at, tail = text.rpartition("@")
    # Up to the last "@": a password may itself hold "/", ":" or "@", and the scheme may be
    # missing. A path (file:///a@b) has no credentials.
    if at and not head.startswith(("/", "file:///")):
        scheme = _SCHEME.match(head)
        text = f"{scheme[0] if scheme else ''}{MASK}@{tail}"
    return _QUERY_SECRET.sub(rf"\1{MASK}", text)


def shown(value: object) -> str:
    """A value as an error message may show it: as JSON, short, credentials masked.

    Tables and lists are named by their type only, because a secret may sit inside.

    >>> shown(None), shown("8"), shown(8), shown({"a": 1})
    ('null', '"8"', '8', 'a table')
    """
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, str):
        text = json.dumps(mask_url(value))
    elif value is None or isinstance(value, bool | int | float):
        text = json.dumps(value)
    else:
        return f"a {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."
