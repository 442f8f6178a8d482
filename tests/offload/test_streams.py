"""The order of copies on an accelerator's streams, with streams and events that write down what they are told."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch

from fxpasses import OffloadError
from fxpasses.offload.runtime import device_copies
from fxpasses.offload.runtime.device_copies import DeviceCopies

DEVICE = torch.device("cuda", 1)


class Stream:
    """Does not run anything: `log` holds events to wait for and the names of copies."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self.log: list[Any] = []
        self.stream_id = id(self)

    def wait_event(self, event: Event) -> None:
        self.log.append(event)

    def __enter__(self) -> None:
        current.before, current.stream = current.stream, self

    def __exit__(self, *error: object) -> None:
        current.stream = current.before


class Event:
    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        self.at: tuple[Stream, int] | None = None

    def record(self, stream: Stream) -> None:
        self.at = (stream, len(stream.log))


class Memory:
    """What copies are made of and into."""

    def __init__(self, name: str) -> None:
        self.name = name

    def copy_(self, source: Memory, non_blocking: bool) -> None:
        assert non_blocking
        current.stream.log.append(f"{source.name} to {self.name}")


current: Any = threading.local()


def before(stream: Stream, position: int | None = None) -> set[str]:
    """All that is known to have ended where a stream has come to a position in its log."""
    found: set[str] = set()
    for entry in stream.log[:position]:
        found |= {entry} if isinstance(entry, str) else before(*entry.at)
    return found


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        accelerator=types.SimpleNamespace(current_stream=lambda device: current.stream),
    )
    monkeypatch.setattr(device_copies, "torch", fake)
    monkeypatch.setattr(device_copies.cuda_extras, "is_capturing", lambda device: False)
    current.stream = Stream()
    current.stream.log.append("compute")
    return DeviceCopies(DEVICE)


def test_a_copy_follows_what_was_queued_and_is_followed_by_what_waits_for_it(copies):
    mine = current.stream
    out = copies.start(Memory("host"), Memory("x"), out=True, after=[])
    back = copies.start(Memory("y"), Memory("host"), out=False, after=[out])
    assert before(*out.event.at) == {"compute", "x to host"}
    assert before(*back.event.at) == {"compute", "x to host", "host to y"}
    assert before(mine) == {"compute"}  # nothing waits before it is told to
    back.release()
    assert "host to y" in before(mine)


def test_a_thread_that_copies_for_another_follows_the_others_stream(copies):
    """Its own current stream knows nothing of the work that used the target's memory before."""
    asking, at, tickets, thread_stream = current.stream, copies.mark(), [], Stream()

    def read() -> None:
        current.stream = thread_stream
        tickets.append(copies.start(Memory("x"), Memory("host"), out=False, after=[], at=at))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert before(*tickets[0].event.at) == {"compute", "host to x"}
    current.stream = Stream()  # given up by a finalizer somewhere else: memory goes back to the stream that asked
    tickets[0].release()
    assert before(asking) == {"compute", "host to x"} and not before(current.stream) and not before(thread_stream)


def test_nothing_is_copied_while_a_graph_is_captured(copies, monkeypatch):
    monkeypatch.setattr(device_copies.cuda_extras, "is_capturing", lambda device: True)
    with pytest.raises(OffloadError, match="a CUDA graph is captured"):
        copies.start(Memory("host"), Memory("x"), out=True, after=[])
