"""Settings: checked when they are made, plain values afterwards."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from kvgate import AdmissionClient, AsyncGate, Gate, GateConfig


def test_the_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVGATE_URL", raising=False)
    assert GateConfig().url == "http://127.0.0.1:7070"
    monkeypatch.setenv("KVGATE_URL", "http://gate:1234/")
    monkeypatch.setenv("KVGATE_TOKEN", "secret")
    assert GateConfig().url == "http://gate:1234"
    assert GateConfig().token == "secret"


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "127.0.0.1:7070"},
        {"url": "ftp://127.0.0.1"},
        {"url": "http://"},
        {"ttl_s": 0},
        {"window_s": 61},
        {"call_timeout_s": float("nan")},
        {"breaker_failures": 0},
        {"retry_for_s": -1},
    ],
)
def test_a_bad_setting_fails_at_once(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        GateConfig(**settings)  # type: ignore[arg-type]


def test_the_token_is_never_printed() -> None:
    config = GateConfig(token="very-secret")
    for text in (repr(config), str(config), repr(AsyncGate(config)), repr(Gate(config))):
        assert "very-secret" not in text


@pytest.mark.parametrize(
    "text",
    [
        "secret-1",
        "# a comment\n\n secret-1 \r\nsecret-2\n",
        "name:client:secret-1\nother:admin:secret-2\n",
        "name : client : secret-1",
    ],
)
def test_a_token_stands_on_the_first_line_of_its_file(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVGATE_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text(text)
    assert GateConfig(token_file=file).token == "secret-1"
    monkeypatch.setenv("KVGATE_TOKEN_FILE", str(file))
    config = GateConfig()
    assert config.token == "secret-1"
    assert "secret" not in repr(config)
    file.unlink()
    assert pickle.loads(pickle.dumps(config)) == config, "a copy needs no file"
    assert GateConfig(token="secret-3").token == "secret-3", "a token goes before a file"


def test_what_is_given_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, found = tmp_path / "given", tmp_path / "found"
    given.write_text("of-the-file\n")
    found.write_text("of-the-other\n")
    monkeypatch.setenv("KVGATE_TOKEN", "of-the-variable")
    monkeypatch.setenv("KVGATE_TOKEN_FILE", str(found))
    assert GateConfig(token_file=given).token == "of-the-file"
    assert GateConfig(token="mine").token == "mine"
    assert GateConfig().token == "of-the-variable"
    monkeypatch.delenv("KVGATE_TOKEN")
    assert GateConfig().token == "of-the-other"


@pytest.mark.parametrize("data", [b"", b"# nothing\n", b"name:client:", b"name:client: \nsecret:a:b", b"secret-\xff"])
def test_a_token_file_without_a_token_fails_at_once(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVGATE_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_bytes(data)
    with pytest.raises(ValueError, match="token_file") as caught:
        GateConfig(token_file=file)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="token_file"):
        GateConfig(token_file=tmp_path / "missing")


@pytest.mark.parametrize("kind", [AsyncGate, Gate, AdmissionClient])
def test_gates_can_be_pickled(kind: type[AsyncGate] | type[Gate] | type[AdmissionClient]) -> None:
    config = GateConfig(url="http://gate:1", token="t", client="rollout-3")
    copy = pickle.loads(pickle.dumps(kind(config)))
    inner = copy._gate if isinstance(copy, AdmissionClient) else copy
    assert inner.config == config
