"""The committed CRDs are what the Python types generate."""

import subprocess
import sys
from pathlib import Path

import pytest

from lorafleet_api import generate


@pytest.mark.parametrize("folder", generate.output_folders(), ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_crds_are_current(folder: Path) -> None:
    for name, content in generate.render().items():
        assert (folder / name).read_text(encoding="utf-8") == content, "run python -m lorafleet_api.generate"


def test_check_finds_a_stale_file(tmp_path: Path) -> None:
    assert generate.main(["--out", str(tmp_path)]) == 0
    assert generate.main(["--check", "--out", str(tmp_path)]) == 0
    stale = tmp_path / "lorafleet.dev_adapterruns.yaml"
    stale.write_text(stale.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert generate.main(["--check", "--out", str(tmp_path)]) == 1
    stale.unlink()
    assert generate.main(["--check", "--out", str(tmp_path)]) == 1


def test_check_of_the_checkout_passes_from_the_command_line() -> None:
    command = [sys.executable, "-m", "lorafleet_api.generate", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
