"""The Dockerfile against the workspace: uv reads every member's metadata, whichever package an image is for."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_build_stage_gets_every_members_metadata() -> None:
    members = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for stage in (ROOT / "Dockerfile").read_text().split("\nFROM ")[1:]:
        if "uv sync" not in stage:
            continue
        lines = stage.splitlines()
        for member in members:
            whole, metadata = f"COPY {member} {member}", f"COPY {member}/pyproject.toml {member}/pyproject.toml"
            assert whole in lines or metadata in lines, f"{lines[0]}: {member}"
            assert f"!{member}" in ignored or f"!{member}/pyproject.toml" in ignored, member
