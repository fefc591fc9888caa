"""Rules of the house that no linter knows."""

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rotaryquant
from rotaryquant.ops import dispatch

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(rotaryquant.__file__).parent
BIN = Path(sys.executable).parent

#: Anything that rebuilds keys or values from codes.
REBUILDS = {"decode", "decode_keys", "decode_values", "dequantize", "unpack", "unseal", "canonical", "decompress"}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, env={**environment}
    )


def test_imports_follow_the_contracts() -> None:
    tool = shutil.which("lint-imports", path=str(BIN)) or shutil.which("lint-imports")
    if tool is None:
        pytest.skip("import-linter is not installed")
    result = subprocess.run(
        [tool, "--no-logo", "--no-cache", str(REPOSITORY / ".importlinter")],
        capture_output=True, text=True, check=False, cwd=REPOSITORY, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr


def test_importing_the_package_loads_no_host_and_starts_no_device() -> None:
    code = (
        "import sys, rotaryquant\n"
        "assert rotaryquant.parse_kv('iso3').key_bits == 3\n"
        "heavy = {'transformers', 'huggingface_hub', 'gguf', 'torch', 'triton', 'rotaryquant._native'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_core_imports_without_transformers() -> None:
    """A host that pins another transformers must be able to use the core: hide it altogether."""
    modules = ("attention", "kv.packed", "kv.state", "kv.accounting", "sampling", "counters", "config")
    modules += tuple(f"ops.{op}.{kernel}" for op, kernel, _ in dispatch.explain())
    code = (
        "import sys\n"
        "sys.modules.update(transformers=None, huggingface_hub=None, gguf=None)\n"
        f"import torch, {', '.join(f'rotaryquant.{module}' for module in modules)}\n"
        "print(torch.cuda.is_initialized())"
    )
    result = python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "False"


def test_importing_the_integration_patches_nothing() -> None:
    code = (
        "import transformers\n"
        "from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel\n"
        "before = set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())\n"
        "methods = dict(vars(PreTrainedModel))\n"
        "import rotaryquant.integrations.transformers.enable\n"
        "after = set(AttentionInterface().valid_keys()), set(AttentionMaskInterface().valid_keys())\n"
        "print(before == after, dict(vars(PreTrainedModel)) == methods)"
    )
    result = python(code, HF_HUB_OFFLINE="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("op", dispatch.OPS)
def test_references_know_no_compiled_code(op: str) -> None:
    tree = ast.parse((PACKAGE / "ops" / op / "reference.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names}
    assert not {name.split(".")[-1] for name in modules | names} & {
        "_native",
        "native",
        "cpu",
        "cuda",
        "triton",
        "metal",
    }


@pytest.mark.parametrize("op", dispatch.OPS)
def test_kernel_files_are_the_kernels(op: str) -> None:
    folder = PACKAGE / "ops" / op
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    names = dispatch.kernels_of(op)
    assert files == set(names)
    assert len(names) == len(set(names))
    assert names[-1] == "reference"  # best first, and the reference takes what nothing else can
    for name in names:
        module = importlib.import_module(f"rotaryquant.ops.{op}.{name}")
        assert callable(module.unsupported)
        assert callable(module.run)


def test_every_op_folder_is_listed() -> None:
    folders = {path.parent.name for path in (PACKAGE / "ops").glob("*/__init__.py")}
    assert folders == set(dispatch.OPS)


@pytest.mark.parametrize(
    "file", ["attention.py", "ops/packed_attention/cpu.py", "integrations/transformers/attention.py"]
)
def test_attention_rebuilds_no_keys_or_values(file: str) -> None:
    tree = ast.parse((PACKAGE / file).read_text())
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not (called | imported) & REBUILDS


def test_golden_files_are_not_touched_by_a_run_of_their_script(tmp_path: Path) -> None:
    script = REPOSITORY / "tests" / "golden" / "make_golden.py"
    files = script.parent / "files"
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True, timeout=300)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


def test_environment_is_read_in_one_place() -> None:
    readers = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert readers == ["env.py"]


def test_test_files_have_names_of_their_own() -> None:
    """Test folders are no packages, so two files of one name would shadow each other."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
