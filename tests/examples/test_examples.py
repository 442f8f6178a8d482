"""Each example runs as it stands, and its figures are what they should be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def figures(output: str, columns: int = 2) -> dict[str, list[str]]:
    """The demo's table: the cells of each row by the row's name."""
    rows = (line.rsplit(None, columns) for line in output.splitlines() if "  " in line)
    return {row[0].strip(): row[1:] for row in rows if len(row) == columns + 1}


@pytest.mark.slow
def test_quickstart():
    done = run("quickstart.py")
    assert done.returncode == 0, done.stderr
    assert "16 host reads became 4, 4 tensors built in layers became 1, once per batch" in done.stdout


@pytest.mark.slow
def test_prefetch_training():
    done = run("prefetch_training.py")
    assert done.returncode == 0, done.stderr
    assert "epoch 0: host reads in a step: 0 (eager mode: 5), in the evaluation: 5" in done.stdout
    assert "epoch 2: host reads in a step: 0 (eager mode: 5), in the evaluation: 1" in done.stdout


@pytest.mark.slow
def test_expert_loop():
    done = run("moe_loop.py")
    assert done.returncode == 0, done.stderr
    table = figures(done.stdout)
    assert table["data-dependent queries a step"] == ["8", "0"]
    assert table["loss"][0] == table["loss"][1]
    assert table["graphs"] == ["-", "1"]
    assert "1 loop over experts" in done.stdout


@pytest.mark.slow
def test_the_demos_host_reads_and_masks_do_not_depend_on_the_number_of_layers():
    tables = {}
    for layers in ("2", "4"):
        arguments = ["--layers", layers, "--tokens", "128", "--steps", "4", "--lowering", "aot_eager", "--peer", "none"]
        done = run("packed_training.py", *arguments)
        assert done.returncode == 0, done.stderr
        tables[layers] = figures(done.stdout)
        eager, fastpack = tables[layers]["loss, last step"]
        assert eager == fastpack
        assert tables[layers]["masks built per step"] == [str(2 * int(layers)), "1"]
        assert tables[layers]["graphs compiled"][1] == "1"
    assert tables["2"]["host reads per step"][1] == tables["4"]["host reads per step"][1]


@pytest.mark.slow
def test_the_demo_with_inductor():
    done = run("packed_training.py", "--layers", "2", "--tokens", "128", "--steps", "4", "--peer", "inductor")
    assert done.returncode == 0, done.stderr
    assert "inductor" in done.stdout and "graphs compiled" in done.stdout


@pytest.mark.slow
def test_the_demo_on_hugging_faces_own_flash_path():
    arguments = ["--attention", "flash", "--layers", "4", "--tokens", "256", "--steps", "3", "--lowering", "aot_eager"]
    done = run("packed_training.py", *arguments)
    assert done.returncode == 0, done.stderr
    table = figures(done.stdout, columns=3)  # eager, fastpack, stock eager
    assert len(set(table["loss, last step"])) == 1
    eager, fastpack, stock = map(int, table["host reads per step"])
    assert fastpack < stock <= eager
    assert table["graph breaks"][1] == "0" != table["graph breaks"][2]
    assert table["graphs compiled"][1] == "1" < table["graphs compiled"][2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "3"], "'3' is not a whole number from 16"),
        pytest.param(["--peer", "xla"], "invalid choice: 'xla'", marks=pytest.mark.slow),
        pytest.param(["--layers", "none"], "'none' is not a whole number from 1", marks=pytest.mark.slow),
        pytest.param(["--attention", "none"], "invalid choice: 'none'", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_argument_gives_one_line_and_exit_code_2(arguments, words):
    done = run("packed_training.py", *arguments)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_demo_with_activations_on_disk():
    arguments = ["--offload", "--layers", "3", "--tokens", "128", "--steps", "3", "--lowering", "aot_eager"]
    arguments += ["--peer", "none"]
    done = run("packed_training.py", *arguments)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    moved = next(row for row in rows if row[:2] == ["bytes", "moved"])
    assert moved[4:6] == ["–", "–"] and float(moved[6]) > 0
    assert any(row[:2] == ["time", "exposed"] for row in rows) and any(row[:2] == ["memory", "of"] for row in rows)


@pytest.mark.slow
def test_offload_to_disk():
    done = run("offload_to_disk.py")
    assert done.returncode == 0, done.stderr
    assert "tensors_out=7, bytes_out=58720256, tensors_in=7" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("example", "steps"), [("finetune_trl.py", "4"), ("dpo.py", "3"), ("qlora.py", "3")])
def test_fine_tuning_with_trl_is_eager_modes_training(example, steps):
    if example == "qlora.py":
        pytest.importorskip("bitsandbytes")
    losses = []
    for arguments in (["--eager"], ["--lowering", "aot_eager"]):
        done = run(example, *arguments, "--steps", steps)
        assert done.returncode == 0, done.stderr
        table = figures(done.stdout, columns=1)
        losses.append([table[str(step + 1)] for step in range(int(steps))])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][-1]
    if example != "dpo.py":
        assert table["graphs"] in (["1"], ["2"])  # the second for all lengths


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "tp", "ep"])
def test_training_over_two_processes(parallel):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "distributed_training.py"), "--parallel", parallel, "--layers", "2"]
    command += ["--steps", "3", "--lowering", "aot_eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    table = figures(done.stdout)
    assert table["loss, last step"][0] == table["loss, last step"][1]
    assert table["masks built per step"] == ["4", "1"]
    if parallel != "ep":  # whose `.tolist()` eager mode does not count
        assert table["host reads per step"] == ["8", "2"]
    assert table["graphs compiled"][1] == "1" and table["graph breaks"][1] == "0"


@pytest.mark.slow
def test_varlen_attention_says_what_reaches_one_graph():
    done = run("varlen_attention.py")
    assert done.returncode == 0, done.stderr
    *losses, graphs = done.stdout.splitlines()
    assert len(losses) == 3 and graphs == "graphs: 1, graph breaks: 0"
    assert all(line.split()[-6] == line.split()[-2] for line in losses), losses


def test_training_over_processes_says_how_it_is_started():
    done = run("distributed_training.py")
    assert done.returncode == 2
    assert "start it with torchrun: torchrun --nproc-per-node 2" in done.stderr.splitlines()[-1]
