"""The runtime's configuration file."""

from pathlib import Path

import pytest
import yaml

from lorafleet_runtime.config.config import load_config
from lorafleet_runtime.errors import ConfigError
from support.runs import pool_spec


def write(tmp_path: Path, **changes: object) -> Path:
    (tmp_path / "token").write_text("secret\n")
    config = {
        "pool": {"namespace": "default", "name": "pool", "spec": pool_spec().to_wire()},
        "port": 8080,
        "tokenFile": str(tmp_path / "token"),
        "storageRoot": str(tmp_path),
    } | changes
    path = tmp_path / "runtime.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_good_file_loads(tmp_path: Path) -> None:
    config = load_config(write(tmp_path))
    assert (config.port, config.token, config.pool.spec.slots) == (8080, "secret", 2)


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prot"):
        load_config(write(tmp_path, prot=1))


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenFile"):
        load_config(write(tmp_path, tokenFile=str(tmp_path / "no")))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        load_config(tmp_path / "no.yaml")
