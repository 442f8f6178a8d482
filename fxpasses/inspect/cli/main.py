"""The command `fxpasses`: its arguments, exit codes, and errors, which are one line each on standard error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from fxpasses.inspect.failure import Failure
from fxpasses.version import __version__

_EPILOG = """\
examples:
  fxpasses inspect train.py --steps 3             what the passes did to a program
  fxpasses inspect --html report.html train.py    the same as a page, to click through
  FXPASSES_RECORD=records torchrun train.py       a record of every process, without a change to the program
  fxpasses inspect records/                       show the records in a folder, or one file
  fxpasses diff before.jsonl after.jsonl          two versions of torch, two options, two commits
  fxpasses explain records/                       what was left alone, and why
  fxpasses draw run.jsonl matmul                  a node and its neighbourhood, as DOT or SVG
  fxpasses bisect check.py                        which pass makes check.py fail
  fxpasses doctor                                 what works on this machine

`fxpasses COMMAND --help` has the details and the exit codes; 2 always means a wrong argument or an unreadable file.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a log file in ASCII must not stop the report
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.run
    try:
        return command(parsed)
    except Failure as error:
        print(f"fxpasses: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0
    except OSError as error:  # of a file that a command writes; errors of a user's program are shown before
        print(f"fxpasses: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    # Each command imports what it needs when it runs: `--help` must not wait for torch.
    from fxpasses.inspect.cli import bisect, comparing, doctor, drawing, explaining, inspecting

    parser = argparse.ArgumentParser(
        prog="fxpasses", description="See what graph passes do to a program that torch.compile runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"fxpasses {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in (inspecting, comparing, explaining, bisect, drawing, doctor):
        sub = commands.add_parser(
            module.NAME, help=module.HELP, description=module.HELP[0].upper() + module.HELP[1:] + ".",
            epilog=module.EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser
