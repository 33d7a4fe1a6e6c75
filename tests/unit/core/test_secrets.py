"""Secrets do not reach what is kept: refused where they are given, and hidden where they would be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.errors import UsageError
from elastic.core.secrets import (
    check_options,
    check_url,
    is_secret_name,
    redact,
    redact_url,
    redact_values,
    secret_values,
)
from elastic.observe.journal import JournalReader, JournalWriter

# Put together here, so that nobody takes this file for a leak.
ACCESS_KEY = "AKIA" + "IOSFODNN7EXAMPLE"
HUB_TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f"


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "WANDB_API_KEY", "HF_TOKEN", "hfToken", "db-password", "secret",
     "api_key", "apiKey", "gcs_credentials", "ssh_private_key", "AZURE_STORAGE_ACCOUNT_KEY", "PGPASSWORD", "MYSQL_PWD",
     "AZURE_STORAGE_CONNECTION_STRING", "SLACK_WEBHOOK_URL"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["tokenizer", "max_tokens", "num_key_value_heads", "key", "monkey", "secretary", "AWS_REGION", "keys",
     "private_key_file", "token_ids", "password_length", "lr", "PWD", "OLDPWD", "webhook_retries"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "url",
    [f"s3://{ACCESS_KEY}:wJalrXUtnFEMI@bucket/runs", "s3://key:s3cr3t/with@bucket", f"s3://{ACCESS_KEY}@bucket/runs",
     "simplecache::s3://key:s3cr3t@bucket/x", "https://host/x?X-Amz-Signature=abcdef0123", "abfs://c@a/x?sig=abcdef",
     "sftp://me:s3cr3t@host/runs"],
)  # fmt: skip
def test_addresses_with_credentials_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="holds credentials") as caught:
        check_url(url)
    assert not any(part in str(caught.value) for part in ("wJalr", "s3cr3t", "abcdef", ACCESS_KEY))
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/runs",
        "sftp://me@host/runs",
        "http://host:9000/a@b",
        "/a@b:c/d",
        "memory://x",
        "gs://bucket/a?b=c",
        "abfs://c@a.net/x",
    ],
)
def test_other_addresses_are_taken(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"hub": {"hf_token": "aB3dE5gH7jK9mN1pQ3"}}, "config.hub.hf_token"),
        ({"wandb_api_key": "0123456789abcdef"}, "config.wandb_api_key"),
        ({"list": [1, {"password": "x"}]}, "config.list[1].password"),
        ({"model": HUB_TOKEN}, "config.model"),
        ({"names": [ACCESS_KEY]}, "config.names[0]"),
        ({"data": "s3://key:s3cr3t@bucket/data"}, "config.data"),
    ],
)
def test_options_that_hold_secrets_are_refused_by_name(config: dict[str, Any], place: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(config, "config")
    assert str(caught.value).startswith(f"{place} looks like a secret")
    assert not any(text in str(caught.value) for text in (HUB_TOKEN, ACCESS_KEY, "s3cr3t", "0123456789"))


def test_options_of_language_models_are_taken() -> None:
    check_options(
        {
            "eos_token": "<|endoftext|>", "bos_token": "<s>", "pad_token": "</s>", "max_tokens": 4096, "token": "word",
            "tokenizer": "meta-llama/Llama-3-8B", "num_key_value_heads": 8, "key": "value", "data": "s3://bucket/data",
            "api_key": "", "password": None, "secret": 0.5, "api_key_file": "/run/secrets/key", "token_env": "HF_TOKEN",
            "hf_token": "$HF_TOKEN",
        },
        "config",
    )  # fmt: skip


@given(
    secret=st.text(min_size=8, max_size=40),
    record=st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
)
def test_what_is_redacted_stays_json(secret: str, record: Any) -> None:
    values = secret_values({"MY_API_KEY": secret, "HOME": "/root", "SHORT_TOKEN": "abc"})
    line = json.dumps({"text": f"before {secret} after", "record": record}, separators=(",", ":"), ensure_ascii=False)
    assert "abc" not in values
    assert secret not in json.loads(redact(line, values))["text"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    | st.sampled_from(("s3://me:p4ss@bucket/x", "https://host/?sig=abcdefgh", "Pwd=s3cr3t;", HUB_TOKEN, "MY-SECRET")),
    lambda inner: st.lists(inner, max_size=12) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value, ("MY-SECRET",))
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@given(json_values)
def test_each_text_is_redacted_wherever_it_is(value: Any) -> None:
    assert json.dumps(redact_values(value, ("MY-SECRET",))) == json.dumps(plain(value))


@given(st.text(alphabet="=:/@?&pwd sig.") | st.text())
def test_what_has_no_mark_of_an_address_has_nothing_of_one_to_hide(text: str) -> None:
    assert ("=" in text or "://" in text) or redact_url(f"{text}=://")[: len(text)] == text


def test_what_a_user_prints_into_an_error_is_not_journaled(tmp_path: Path) -> None:
    secret = 'wJalr"XUtnFEMI/K7MDENG'
    writer = JournalWriter(str(tmp_path), "run", secrets=secret_values({"AWS_SECRET_ACCESS_KEY": secret}))
    sentence = f"cannot open s3://me:p4ss@bucket/x with {secret}, {HUB_TOKEN}"
    writer.append({"type": "decision", "sentence": sentence, "data": {"traceback": f"KeyError: {secret!r}"}})
    (record,) = (r for r in JournalReader(str(tmp_path), "run").records() if r["type"] == "decision")
    assert record["sentence"] == "cannot open s3://***@bucket/x with ***, ***"
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*.jsonl")).decode()
    assert not any(text in kept for text in ("wJalr", "p4ss", HUB_TOKEN))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=c2VjcmV0Cg==;EndpointSuffix=core.windows.net",
            "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=***;EndpointSuffix=core.windows.net",
        ),
        ("Server=db;Uid=me;Pwd=s3cr3t;", "Server=db;Uid=me;Pwd=***;"),
        (
            "POST https://hooks.slack.com/services/T000/B000/XXXX failed",
            "POST https://hooks.slack.com/services/*** failed",
        ),
        ("https://discord.com/api/webhooks/123/abc-DEF", "https://discord.com/api/webhooks/***"),
        ("step 7: password reset mails are sent", "step 7: password reset mails are sent"),
    ],
)
def test_connection_strings_and_webhooks(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_values_are_found_in_escaped_forms() -> None:
    secret = 'p\u00e4ss"w/rd 1'
    values = secret_values({"PGPASSWORD": secret})
    for form in (
        secret,
        json.dumps(secret),
        json.dumps(secret, ensure_ascii=False),
        "p%C3%A4ss%22w/rd%201",
        "p%C3%A4ss%22w%2Frd%201",
    ):
        assert "rd" not in redact(form, values), form
