"""The parent's side of a contender's process: it asks, waits no longer than allowed, and observes from outside."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


class PeerFailed(Exception):
    """The contender raised, or its process died. The text is the first line of its error."""


class PeerTooSlow(PeerFailed):
    """No answer within the limit; its process has been killed."""


class Peer:
    """A contender in a process of its own.

    folder: for its compile caches and its log; a second peer with the same folder starts with filled caches.
    """

    def __init__(
        self, case: str, contender: str, parameters: Mapping[str, Any], device: str, threads: int, folder: Path
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        given = {"case": case, "contender": contender, "parameters": parameters, "device": device, "threads": threads}
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "OMP_WAIT_POLICY": "PASSIVE",  # a contender must not spin after its turn
            "OMP_NUM_THREADS": str(threads),
            # glibc may return freed memory after each step, depending on its layout: thousands of page faults.
            "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
            "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
            "KINETO_LOG_LEVEL": "6",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        }
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bench.worker", json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment,
                start_new_session=True,  # so that Inductor's compile workers end with it
            )
        self.pending = b""

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        """Raises PeerTooSlow after `limit_s` seconds, and PeerFailed where the answer is an error or there is none."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"verb": verb, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._died(verb)
        answer: dict[str, Any] = json.loads(self._line(verb, time.monotonic() + limit_s, limit_s))
        if "error" in answer:
            self.close()
            raise PeerFailed(answer["error"])
        return answer

    def _line(self, verb: str, deadline: float, limit_s: float) -> bytes:
        assert self.process.stdout is not None
        output = self.process.stdout.fileno()
        while b"\n" not in self.pending:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise PeerTooSlow(f"{verb} took more than {limit_s:.0f} s")
            data = os.read(output, 1 << 16)
            if not data:
                self._died(verb)
            self.pending += data
        line, self.pending = self.pending.split(b"\n", 1)
        return line

    def _died(self, verb: str) -> None:
        self.close()
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PeerFailed(": ".join([f"the process {how} during {verb}", *last]))

    def resident_bytes(self) -> int | None:
        """The resident set now; None where there is no /proc."""
        return self._status("VmRSS")

    def peak_bytes(self) -> int | None:
        """The largest resident set since the process began, or since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        if self.resident_bytes() is not None:
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def _status(self, key: str) -> int | None:
        try:
            text = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key + ":")), None)

    def close(self) -> None:
        """End the process and everything that it started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=0.2)  # a process that is about to die reports how
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
