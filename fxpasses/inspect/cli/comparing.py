"""`fxpasses diff`: shows the differences between two records."""

from __future__ import annotations

import argparse
import sys

NAME = "diff"
HELP = "compare two records: two versions of torch, two options, two commits"
EPILOG = """\
examples:
  fxpasses inspect --save a.jsonl train.py
  fxpasses inspect --save b.jsonl train.py --other-option
  fxpasses diff a.jsonl b.jsonl
  fxpasses diff --stage captured a.jsonl b.jsonl    what reached the passes, not their results

Names, numbers and the order of nodes make no difference.
exit codes: 0 the graphs are the same; 1 they differ; 2 a file cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stage", default="", metavar="NAME", help="captured, or the name of a pass (default: the last stage)"
    )
    parser.add_argument("--all", action="store_true", help="print all differences in full")
    parser.add_argument("before", metavar="A", help="a record, or a folder of records")
    parser.add_argument("after", metavar="B", help="another record or folder")


def run(given: argparse.Namespace) -> int:
    from fxpasses.inspect.cli.records import load_one
    from fxpasses.inspect.comparison import comparison
    from fxpasses.inspect.text import Style

    style = Style.of(sys.stdout, given.all)
    text, differs = comparison(load_one(given.before), load_one(given.after), given.stage, style)
    print(text)
    return int(differs)
