"""Who may import whom, and what stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "vllm", "megatron", "transformers")


def test_import_layers_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "lorafleet_api.v1alpha1.wire",
        "lorafleet_operator.app",
        "lorafleet_runtime.config.config",
        "lorafleet_runtime.registry.registry",
        "lorafleet_runtime.http.app",
        "lorafleet_runtime.storage",
    ],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_runtime_process_loads_no_torch() -> None:
    code = "import lorafleet_runtime.cli.serve, sys; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
