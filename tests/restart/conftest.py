from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxpasses.base import once
from fxpasses.restart import recording
from tests.restart.restarting import forget


@pytest.fixture(autouse=True)
def nothing_is_left(capture_flags: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No trace, and no warning that was given."""
    monkeypatch.setattr(recording, "_is_on", False)
    monkeypatch.setattr(once, "_given", set())
    yield
    forget()
