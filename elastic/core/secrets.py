"""What must not be written down: credentials in addresses, in a job's options, and in texts on their way to storage.

Names say more than values, and neither says everything: what is refused here is what is surely a slip. `redact` is the
second net, under everything that goes to a journal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from elastic.core.errors import UsageError

HIDDEN = "***"

# Whole last words of a name, so that `max_tokens`, `tokenizer` and `num_key_value_heads` are none of them.
_NAMES = re.compile(
    r"(?:^|_)(?:(?:pg)?password|passwd|passphrase|connection_?string|webhook(?:_url)?|secrets?|credentials?|(?:api|access|secret|private|account|auth|signing"
    r"|encryption)_?key|(?:access|auth|bearer|session|refresh)_?token)$|_pwd$"
)
_TOKEN = re.compile(r"(?:^|_)token$")
# A token of text ("<|endoftext|>") is not a token of access, which is long and holds letters and digits.
_RANDOM = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9_\-./+=]{16,}")
# The exact types of values in which there is nothing to look for.
_PLAIN = {int, float, bool, type(None)}
# To look at so many values one by one takes no longer than to ask for all their types at once.
_FEW = 8
_KNOWN = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30,}|\bgh[opsu]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[A-Za-z0-9+/=\s\\]*"
)
# Parts of connection strings (Azure, ODBC), and webhooks whose path is the secret.
_PARTS = re.compile(
    r"(?i)\b((?:accountkey|sharedaccesskey|sharedaccesssignature|password|pwd)=)[^;&\s\"'\\]+"
    r"|(?<=://)(hooks\.slack\.com/services/|(?:\w+\.)?discord(?:app)?\.com/api/webhooks/|\w+\.webhook\.office\.com/)"
    r"[^?\s\"'\\]+"
)
# Passwords of S3 hold slashes; what follows a port is a path and no password.
_USER_INFO = re.compile(r"(?<=://)(?:[^/?#@:\s\"'\\]+:(?![0-9]+/)[^@\s\"'\\]*|[^/?#@:\s\"'\\]+)(?=@)")
_QUERY = re.compile(
    r"(?i)(?<=[?&])((?:x-amz-(?:signature|credential|security-token)|x-goog-(?:signature|credential)|sig|signature"
    r"|token|access_?token|password|secret|key|api_?key|accountkey)=)[^&#\s\"'\\]+"
)
_SHORTEST = 8


def is_secret_name(name: str) -> bool:
    """Whether a variable or key of this name holds a secret: "AWS_SECRET_ACCESS_KEY", "hfToken", "db-password"."""
    snake = _snake(name)
    return bool(_NAMES.search(snake) or _TOKEN.search(snake))


def check_url(url: str) -> str:
    """Returns the address, or raises UsageError when it holds credentials: addresses are written to every journal."""
    shown = redact_url(url)
    if shown != url:
        raise UsageError(
            f"the storage address {shown} holds credentials, which would be written to the run's journal; give them by "
            "the environment instead (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the machine's own role)"
        )
    return url


def check_options(options: Any, name: str) -> None:
    """Raises UsageError naming the first value below `name` that is surely a secret: options are kept in storage."""
    found = _find(options, name)
    if found is not None:
        raise UsageError(
            f"{found} looks like a secret, and a job's options are kept in storage; leave it out, give it by the "
            "environment of the workers, and read it there from os.environ"
        )


def redact_url(url: str) -> str:
    """The address without user, password and signatures."""
    if "=" not in url and "://" not in url:
        return url  # Without these nothing is found, and most texts have neither.
    shown = _PARTS.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", _USER_INFO.sub(_hide_user, url))
    return _QUERY.sub(rf"\1{HIDDEN}", shown)


def redact(text: str, values: Iterable[str] = ()) -> str:
    """`text` without credentials in URLs, tokens of well-known forms, and `values`. JSON stays JSON."""
    for value in values:
        text = text.replace(value, HIDDEN)
    return _KNOWN.sub(HIDDEN, redact_url(text))


def redact_values(value: Any, values: Iterable[str] = ()) -> Any:
    """JSON data with `redact` applied to each text in it. Keys, numbers and the structure stay as they are.

    Data with nothing to hide, as nearly all is, is returned itself: what ten thousand nodes report is not copied.
    """
    return value if all(redact(text, values) == text for text in _texts(value)) else _redacted(value, values)


def _texts(value: Any) -> list[str]:
    """All texts in JSON data, level by level."""
    found: list[str] = []
    level = [value]
    while level:
        below: list[Any] = []
        for item in level:
            if type(item) in _PLAIN:
                continue
            if isinstance(item, str):
                found.append(item)
            elif isinstance(item, (list, tuple)):
                # Not the numbers of 80,000 workers one by one.
                below += item if len(item) < _FEW or not {*map(type, item)} <= _PLAIN else ()
            elif isinstance(item, Mapping):
                below += item.values()
        level = below
    return found


def _redacted(value: Any, values: Iterable[str]) -> Any:
    if isinstance(value, str):
        return redact(value, values)
    if isinstance(value, (list, tuple)):
        return [_redacted(item, values) for item in value]
    if isinstance(value, Mapping):
        return {key: _redacted(item, values) for key, item in value.items()}
    return value


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values of variables that hold secrets, longest first, as they are and as they look escaped."""
    found = {value for name, value in environment.items() if is_secret_name(name) and len(value) >= _SHORTEST}
    found |= {form for value in found for form in _forms(value)}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def _forms(value: str) -> tuple[str, ...]:
    """How a value looks inside JSON, in either kind of escapes, and in an address."""
    return json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1], quote(value), quote(value, safe="")


def _find(value: Any, path: str) -> str | None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            below = f"{path}.{key}"
            if isinstance(item, str) and _is_secret(str(key), item):
                return below
            if (found := _find(item, below)) is not None:
                return found
    elif isinstance(value, (list, tuple)):
        return next((found for n, item in enumerate(value) if (found := _find(item, f"{path}[{n}]")) is not None), None)
    elif isinstance(value, str) and (_KNOWN.search(value) or redact_url(value) != value):
        return path
    return None


def _is_secret(name: str, value: str) -> bool:
    snake = _snake(name)
    if _TOKEN.search(snake) and _RANDOM.fullmatch(value):
        return True
    # An empty one is a place for a secret, and "$NAME" is where to find one.
    return bool(value) and not value.startswith("$") and bool(_NAMES.search(snake))


def _hide_user(found: re.Match[str]) -> str:
    # sftp://user@host names a user, which is no secret; an access key in that place is one.
    user = found[0]
    return user if ":" not in user and not _KNOWN.search(user) else HIDDEN


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
