"""`fastpack` as the name of a backend for accelerate and Trainer, in programs that never import fxpasses."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
from accelerate.commands.config.config_utils import DYNAMO_BACKENDS
from transformers import TrainingArguments

import fxpasses.inspect
from fxpasses.integrations import accelerate_names, autoload

ROOT = Path(__file__).parents[2]

TRAINING = """
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer


def losses(folder, kind, backend):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    texts = [{"input_ids": (ids := torch.randint(32, (6,)).tolist()), "labels": ids} for _ in range(4)]
    arguments = kind(
        folder, max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_strategy="no", report_to=[],
        learning_rate=1e-3, use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
        torch_compile_backend=backend,
    )
    trainer = Trainer(model, arguments, None, texts)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    try:
        from trl import SFTConfig as Arguments
    except ImportError:
        from transformers import TrainingArguments as Arguments
    torch.set_num_threads(1)
    print("losses", losses(sys.argv[1], Arguments, "fastpack"))
"""

PREPARED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
print(accelerator.state.dynamo_plugin.backend.value)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process that sees the entry points of pyproject.toml, whatever those of the installed package are."""
    text = (ROOT / "pyproject.toml").read_text()
    lines = text.split('[project.entry-points."torch.backends"]\n')[1].split("\n\n")[0].replace('"', "")
    metadata = tmp_path / "site" / "fxpasses_entry_point-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fxpasses-entry-point\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{lines}\n")
    options = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(metadata.parent)]), "OMP_NUM_THREADS": "1",
        "FASTPACK_OPTIONS": json.dumps(options), "FXPASSES_RECORD": str(tmp_path / "records"),
    }  # fmt: skip


def output_of(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def graphs(tmp_path: Path) -> list[str]:
    """The lowering of each graph that the processes compiled with this backend."""
    records = [fxpasses.inspect.load(path) for path in (tmp_path / "records").glob("*.jsonl")]
    return [str(graph.options["lowering"]) for record in records for graph in record.graphs]


@pytest.mark.slow
def test_trainers_take_the_name(tmp_path: Path, environment: dict[str, str]) -> None:
    """In what TRL derives from `TrainingArguments`, where TRL is installed."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    printed = output_of([str(script), str(tmp_path)], environment)
    expected = runpy.run_path(str(script))["losses"](str(tmp_path), TrainingArguments, None)
    assert f"losses {expected}" in printed and len(expected) == 2
    assert graphs(tmp_path) == ["aot_eager"]


@pytest.mark.slow
def test_accelerates_configuration_file_takes_the_name(tmp_path: Path, environment: dict[str, str]) -> None:
    script, config = tmp_path / "prepare.py", tmp_path / "config.yaml"
    script.write_text(PREPARED)
    given = {"distributed_type": "NO", "use_cpu": True, "num_processes": 1}
    config.write_text(json.dumps({**given, "dynamo_config": {"dynamo_backend": "FASTPACK"}}))
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(config), str(script)]
    assert output_of(launch, environment).split() == ["FASTPACK"]
    assert graphs(tmp_path) == ["aot_eager"]


def test_the_launcher_takes_the_name() -> None:
    from accelerate.commands.config.config_utils import _convert_dynamo_backend
    from accelerate.commands.launch import launch_command_parser

    given = launch_command_parser().parse_args(["--dynamo_backend", "fastpack", "train.py"])
    assert given.dynamo_backend == "fastpack"
    assert _convert_dynamo_backend(DYNAMO_BACKENDS.index("FASTPACK")) == "FASTPACK"  # what `accelerate config` asks


def test_who_does_not_use_accelerate_pays_for_seven_small_modules(environment: dict[str, str]) -> None:
    """They import nothing but Python's own, and neither torch nor accelerate."""
    program = """
        import sys, torch
        mine = sorted(name for name in sys.modules if name.partition(".")[0] == "fxpasses")
        print(*mine, "accelerate" in sys.modules)
    """
    printed = output_of(["-c", textwrap.dedent(program)], environment).split()
    names = ["accelerate_names", "autoload", "experts_interface"]
    names = ["", ".errors", ".integrations", *(f".integrations.{name}" for name in names), ".version"]
    assert printed == [f"fxpasses{name}" for name in names] + ["False"]


def test_an_import_of_fxpasses_does_the_same(environment: dict[str, str]) -> None:
    """Where PyTorch's loading of entry points is off."""
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    program = "import fxpasses; from accelerate.utils import DynamoBackend; print(DynamoBackend('FASTPACK').value)"
    assert output_of(["-c", program], environment).split() == ["FASTPACK"]


def test_a_failing_hook_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of `torch.backends` that raised would make `import torch` fail."""
    broken = ModuleType(accelerate_names.ENUMERATION)  # has no DynamoBackend
    monkeypatch.setitem(sys.modules, broken.__name__, broken)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with pytest.warns(UserWarning, match=r"no name of a backend for accelerate.*FastpackCallback.*DynamoBackend"):
        autoload.autoload()


def test_the_member_is_as_any_other() -> None:
    import copy
    import pickle

    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    autoload.autoload()
    autoload.autoload()
    member = DynamoBackend("FASTPACK")
    assert list(DynamoBackend).count(member) == 1 and "FASTPACK" in DynamoBackend.list()
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member is DynamoBackend["FASTPACK"]
    assert member == "FASTPACK" and member.name == str(member) == "FASTPACK"
    assert TorchDynamoPlugin(backend="fastpack", mode="max-autotune").to_kwargs() == {
        "backend": "fastpack", "mode": "max-autotune",
    }  # fmt: skip
