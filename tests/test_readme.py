"""Every Python snippet of the README runs, and prints what it says it prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet(number, tmp_path, monkeypatch, capsys):
    file = tmp_path / f"snippet_{number}.py"
    file.write_text(SNIPPETS[number])
    exec(compile(SNIPPETS[number], str(file), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    for promise in re.findall(r"print\(.*?\)  # (.*)", SNIPPETS[number]):
        assert promise in printed


def test_the_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (Path(__file__).parents[1] / "Makefile").read_text(), flags=re.MULTILINE))
    commands = [line.split("#")[0].split() for block in SHELL for line in block.splitlines()]
    assert commands and all(program == "make" and target in targets for program, target in commands)


def test_every_option_is_in_the_table():
    from dataclasses import fields

    from fxpasses.options import Options

    page = (Path(__file__).parents[1] / "docs" / "options.md").read_text()
    documented = set(re.findall(r"^\| `fastpack\.(\w+)` ", page, flags=re.MULTILINE))
    assert documented == {field.name for field in fields(Options)} - {"inductor"}


def test_options_that_readme_names_are_options():
    from fxpasses.options import Options

    section = README.split("## Options")[1].split("\n## ")[0]
    pairs = re.findall(r'`"(fastpack\.\w+)": ([^`]+)`', section)
    assert len(pairs) >= 9
    for key, value in pairs:
        Options.parse({key: ast.literal_eval(value)})
