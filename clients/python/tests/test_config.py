"""Settings: checked when they are made, plain values afterwards."""

from __future__ import annotations

import pickle

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


@pytest.mark.parametrize("kind", [AsyncGate, Gate, AdmissionClient])
def test_gates_can_be_pickled(kind: type[AsyncGate] | type[Gate] | type[AdmissionClient]) -> None:
    config = GateConfig(url="http://gate:1", token="t", client="rollout-3")
    copy = pickle.loads(pickle.dumps(kind(config)))
    inner = copy._gate if isinstance(copy, AdmissionClient) else copy
    assert inner.config == config
