"""What must hold while Dynamo traces: the capture flags, and a way back where they lead into an error."""

from fxpasses.capture.breaks import CaptureRejected, install, traces_for_fastpack, uninstall
from fxpasses.capture.flags import FLAGS, enable_for_process, scoped

__all__ = ["FLAGS", "CaptureRejected", "enable_for_process", "install", "scoped", "traces_for_fastpack", "uninstall"]
