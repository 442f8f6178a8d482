"""The command `fxpasses`: exit codes, one-line errors, and what each command prints."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.variables import lists

import fxpasses.inspect
from fxpasses.base import overrides
from fxpasses.inspect.cli import main
from tests.inspect.programs import inputs, model, recorded, refused
from tests.support import compiled

ROOT = Path(__file__).parents[2]


@pytest.fixture
def record_file(tmp_path):
    recorded().save(tmp_path / "record.jsonl")
    return str(tmp_path / "record.jsonl")


def test_help_has_examples_and_does_not_wait_for_torch():
    code = "import sys; from fxpasses.inspect.cli import main; main(['--help'])"
    checked = f"import sys\ntry:\n  {code}\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "examples:" in done.stdout and "bisect" in done.stdout


@pytest.mark.parametrize("command", ["inspect", "diff", "explain", "draw", "bisect", "doctor"])
def test_each_command_tells_its_exit_codes(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "exit codes:" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["explain"], ["diff", __file__], ["inspect"], ["draw", "x"], ["bisect"]])
def test_errors_take_one_line(arguments, tmp_path, capsys):
    missing = str(tmp_path / "missing.jsonl")
    assert main([*arguments, missing]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


MISSING = r"^fxpasses: [\w.]+: there is no such module[^\n]*\n$"


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("no.such", 2, MISSING),
        ("no_such", 2, MISSING),
        ("with_a_folder", 2, MISSING),
        ("with_a_folder.no_such", 2, MISSING),
        ("imports_too_much", 1, r"imports_too_much.py[^$]*ModuleNotFoundError: No module named 'no_such_thing'"),
        ("failing_package.train", 1, "RuntimeError: not today"),
    ],
)
def test_a_module_that_is_not_there_and_one_that_fails(name, code, told, tmp_path, capsys, monkeypatch):
    """The first is an error of one line; the second shows its own."""
    for folder, text in (("with_a_folder", ""), ("failing_package", "raise RuntimeError('not today')\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(text)
    (tmp_path / "imports_too_much.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [])
    assert main(["inspect", "-m", name]) == code
    assert re.search(told, capsys.readouterr().err)


def test_inspect_runs_a_script_with_its_arguments(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "from tests.inspect.programs import inputs, model\n"
        "from tests.support import compiled\n"
        "compiled(model)(*inputs())\n"
        "print('arguments', sys.argv[1:])\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    monkeypatch.setattr(sys, "argv", ["fxpasses"])
    monkeypatch.setattr(sys, "path", ["", str(ROOT), *sys.path])
    saved, html = tmp_path / "run.jsonl", tmp_path / "report.html"
    code = main(["inspect", "--save", str(saved), "--html", str(html), str(script), "--steps", "7"])
    printed = capsys.readouterr().out
    assert code == 7
    assert "arguments ['--steps', '7']" in printed and "3 host reads became 1" in printed
    assert len(fxpasses.inspect.load(saved).graphs) == 1 and "3 host reads became 1" in html.read_text()


def test_inspect_says_that_nothing_was_compiled(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "argv", ["fxpasses"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert main(["inspect", str(tmp_path / "empty.py")]) == 3
    assert "no graph was compiled" in capsys.readouterr().out


def test_inspect_shows_a_folder_of_ranks(tmp_path, capsys):
    for rank in (1, 0):
        record = recorded()
        record.rank, record.pid = rank, 100 + rank
        record.save(tmp_path / f"record-rank{rank}.jsonl")
        torch._dynamo.reset()
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.index(", rank 0") < printed.index(", rank 1")


def test_diff_of_a_record_with_itself_and_with_another(tmp_path, capsys, record_file):
    assert main(["diff", record_file, record_file]) == 0
    assert capsys.readouterr().out == "1 graph is the same in both\n"
    torch._dynamo.reset()
    other = str(tmp_path / "other.jsonl")
    recorded(passes=[]).save(other)
    assert main(["diff", other, record_file]) == 1
    printed = capsys.readouterr().out
    assert "layers 0–2: the same changes ×3" in printed and "host reads" in printed
    assert "passes: () → ('hoist_metadata',)" in printed
    assert main(["diff", "--stage", "captured", other, record_file]) == 0


def test_explain_names_what_was_taken_and_what_was_not(tmp_path, capsys):
    path = str(tmp_path / "record.jsonl")
    recorded(refused, torch.randn(4), torch.tensor([3, 5]), torch.tensor(2.0)).save(path)
    assert main(["explain", path]) == 0
    printed = capsys.readouterr().out
    assert "taken by hoist_metadata" in printed
    assert "left alone, and why" in printed and "costs 2 host reads" in printed


@pytest.mark.parametrize("option", ["--html", "--save"])
def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path, capsys, record_file, option):
    assert main(["inspect", option, str(tmp_path / "missing" / "file"), record_file]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "there is no folder" in captured.err
    assert main(["inspect", option, str(tmp_path), record_file]) == 2  # a folder, and no file
    assert capsys.readouterr().err.count("\n") == 1


def test_options_after_a_record_are_refused(capsys, record_file):
    assert main(["inspect", record_file, "--html", "page.html"]) == 2
    assert "options stand before the record" in capsys.readouterr().err


def test_a_broken_record_does_not_hide_the_others_of_its_folder(tmp_path, capsys):
    (tmp_path / "record-1.jsonl").write_text("")
    recorded().save(tmp_path / "record-2.jsonl")
    assert main(["explain", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "taken by hoist_metadata" in printed.out
    assert printed.err.count("\n") == 1 and "left out: " in printed.err and "record-1.jsonl" in printed.err


def test_a_recompilation_of_which_the_same_is_to_be_said_is_told_once(tmp_path, capsys):
    record = recorded()
    again = dataclasses.replace(record.graphs[0], compile_id="0/1", recompile=1)
    record.graphs.append(again)
    record.save(tmp_path / "record.jsonl")
    assert main(["explain", str(tmp_path / "record.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("taken by") == 1 and "recompilation 1\nthe same as graph 0/0" in printed


def test_draw_writes_dot(record_file, capsys):
    assert main(["draw", record_file, "matmul"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("digraph") and "matmul\\nmatmul" in text and "#8a5200" in text
    assert main(["draw", record_file, "nobody"]) == 2
    assert "no node 'nobody'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"fxpasses {fxpasses.__version__}\n"


def test_doctor(capsys, monkeypatch):
    monkeypatch.delenv("FXPASSES_PASSES", raising=False)
    main(["doctor"])
    told = capsys.readouterr().out
    assert torch.__version__ in told
    assert re.search(r"ok +members of lists +else `3 in lengths.tolist\(\)` may take the", told)
    monkeypatch.delattr(lists, "iter_contains")
    assert main(["doctor"]) == 1
    assert re.search(r"off +members of lists +torch \S+ has no", capsys.readouterr().out)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    main(["doctor"])
    assert re.search(r"note +fold layers +checked on torch", capsys.readouterr().out)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert main(["doctor"]) == 1
    assert "nothing is compiled" in capsys.readouterr().out
    main(["doctor", "-v"])
    told = " ".join(capsys.readouterr().out.split())
    assert "can go when Dynamo compares numbers" in told and "lists.iter_contains" in told


def test_the_environment_chooses_passes(monkeypatch):
    monkeypatch.setenv("FXPASSES_PASSES", "")
    assert len(recorded().graphs[0].stages) == 1
    torch._dynamo.reset()
    monkeypatch.setenv("FXPASSES_PASSES", "nothing_of_that_name")
    with pytest.raises(
        Exception, match="FXPASSES_PASSES holds 'nothing_of_that_name'; choices: hoist_writes, group_experts"
    ):
        compiled(model)(*inputs())


def test_the_environment_limits_the_graphs(monkeypatch):
    monkeypatch.setattr(overrides, "_compiled", 0)
    monkeypatch.setenv("FXPASSES_GRAPHS", "1")
    assert len(recorded().graphs[0].stages) == 2
    torch._dynamo.reset()
    assert len(recorded().graphs[0].stages) == 1


def test_a_program_is_right_under_every_limit_of_changes(monkeypatch):
    """What is left out is computed where it is written, and what others need of it is still provided."""

    def masks(x, lengths):
        for factor in range(3):
            mask = torch.zeros(8, 8)
            mask[: lengths.max().item()] = factor + 1
            x = mask.mul(2) @ x
        return x

    x, lengths = torch.randn(8, 4, requires_grad=True), torch.tensor([3, 5])
    masks_left = []
    for limit in range(4):
        torch._dynamo.reset()
        monkeypatch.setattr(overrides, "_changes", {})
        monkeypatch.setenv("FXPASSES_CHANGES", f"hoist_metadata:{limit}")
        with fxpasses.inspect.record() as record:
            found = compiled(masks, passes=["hoist_metadata"])(x, lengths)
        assert torch.equal(found, masks(x, lengths))
        main_graph = record.graphs[0].final.regions[0].nodes
        masks_left.append(sum(node.short_target == "mul" for node in main_graph))
    assert masks_left == [3, 2, 1, 0]


@pytest.mark.parametrize("given", ["hoist_metadata", "hoist_metadata:x", "3"])
def test_a_limit_of_changes_is_checked(monkeypatch, given):
    monkeypatch.setenv("FXPASSES_CHANGES", given)
    with pytest.raises(Exception, match=r"FXPASSES_CHANGES is .*as in hoist_metadata:3"):
        compiled(model)(*inputs())
