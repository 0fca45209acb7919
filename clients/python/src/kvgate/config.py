"""How a gate is reached and how patient its callers are.

A configuration is a plain frozen value: it can be pickled into a Ray actor, kept over a fork and shared by
event loops. It is checked when it is made, so that a typo fails at the start and never inside a rollout.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:7070"
TOKEN_FILE_BYTES_MAX = 1 << 20
"""So much of a token file is read: the gate's own may have a thousand lines."""


def _url() -> str:
    return os.environ.get("KVGATE_URL") or DEFAULT_URL


def _token_of_environment() -> str | None:
    """The token itself goes before a file, which may be the one that a gate of the same environment reads."""
    token, file = os.environ.get("KVGATE_TOKEN"), os.environ.get("KVGATE_TOKEN_FILE")
    return token or (_read_token(file) if file else None)


def _read_token(path: str | os.PathLike[str]) -> str:
    """The token of the first line that is neither empty nor a comment."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file.read(TOKEN_FILE_BYTES_MAX).splitlines()]
    except OSError as error:
        raise ValueError(f"token_file {os.fspath(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        # The original error would show bytes of the file.
        raise ValueError(f"token_file {os.fspath(path)!r} is not text") from None
    line = next((line for line in lines if line and not line.startswith("#")), "")
    token = line.split(":", 2)[-1].strip()
    if not token:
        raise ValueError(f"token_file {os.fspath(path)!r} holds no token")
    return token


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Settings of a client. The defaults suit a gate on the same host or in the same rack."""

    url: str = field(default_factory=_url)
    """Base address of the gate; `KVGATE_URL` when not given."""
    token: str | None = field(default=None, repr=False)
    """Bearer token. Without it and `token_file`, `KVGATE_TOKEN` is the token, else `KVGATE_TOKEN_FILE` names its file.
    Never printed."""
    token_file: str | os.PathLike[str] | None = None
    """File with the token, read when the configuration is made and there is no `token`. The token stands on its first
    line, alone or as in the gate's own file: `name:scope:token`."""
    client: str | None = None
    """A name of this caller for the gate's lists."""
    run: str | None = None
    """Name of the run in step reports; a fresh one for each process when not given."""
    ttl_s: float = 600.0
    """Life of a lease since its grant or last renewal. Held leases are renewed at a third of it."""
    call_timeout_s: float = 2.0
    """Longest time for an answer that is due at once. It bounds what a dead gate can cost a request."""
    window_s: float = 8.0
    """How long one waiting call stays open. Below the claim grace, so that a hung gate is noticed in time."""
    wait_calls_from: int = 32
    """From so many waiting tickets on they share calls of `/v1/wait`."""
    breaker_failures: int = 3
    """Failures in a row after which the gate is not asked for a while."""
    breaker_open_s: float = 5.0
    """How long that while is."""
    retry_for_s: float = 600.0
    """How long releases, cancels and closes are retried in the background."""
    flush_s: float = 5.0
    """How long closing the client waits for what is still to be delivered."""
    connections_max: int = 4096
    """Bound of the connection pool of one event loop."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"the gate's url must be http://HOST:PORT or https://HOST:PORT, not {self.url!r}")
        object.__setattr__(self, "url", self.url.rstrip("/"))
        if self.token is None:
            token = _token_of_environment() if self.token_file is None else _read_token(self.token_file)
            object.__setattr__(self, "token", token)
        for name in ("ttl_s", "call_timeout_s", "window_s", "breaker_open_s", "connections_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        if not 0 < self.window_s <= 60:
            raise ValueError("window_s must be above 0 and at most 60, as the gate's wait_s")
        for name in ("retry_for_s", "flush_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("breaker_failures", "wait_calls_from"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
