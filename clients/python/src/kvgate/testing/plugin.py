"""Fixtures for pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ._fake import FakeGate


@pytest.fixture
def fake_gate() -> Iterator[FakeGate]:
    """A gate with a million tokens, at `fake_gate.url`."""
    with FakeGate() as gate:
        yield gate
