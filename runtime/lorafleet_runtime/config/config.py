"""What `lorafleet-runtime` reads at start: an AdapterPool spec plus port, token file and storage root.

Written by the operator (in a pod) or by the one-machine edition. Imports no accelerator library.
"""

from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_api.v1alpha1.meta import ApiModel
from lorafleet_runtime.errors import ConfigError


class PoolIdentity(ApiModel):
    """The AdapterPool that this runtime serves."""

    namespace: str
    """Its namespace."""
    name: str
    """Its name."""
    spec: AdapterPoolSpec
    """Its spec."""


class RuntimeConfig(ApiModel):
    """The whole configuration file."""

    pool: PoolIdentity
    """The pool."""
    port: int = Field(ge=1, le=65535)
    """Port of the HTTP API."""
    host: str = "127.0.0.1"
    """Address of the HTTP API."""
    token_file: Path
    """File with the bearer token; read again for each check, so that it can be rotated."""
    storage_root: Path
    """Checkpoints and data."""
    ray_temp_dir: Path | None = None
    """Ray's session folder; keep it short, its sockets are limited to 107 characters."""
    state_file: Path | None = None
    """Where the supervisor writes the pids and the Ray address of this runtime."""
    local_resources: bool = True
    """One machine: actors ask for no CPUs. False uses the custom resources of a RayCluster."""
    adapter_runs_api: bool = False
    """Serve miles' /adapter_runs routes."""
    object_store_bytes: int = Field(default=512 << 20, ge=80 << 20)
    """Ray's object store on this node."""

    @property
    def token(self) -> str:
        """The bearer token."""
        return self.token_file.read_text().strip()


def load_config(path: Path) -> RuntimeConfig:
    """Read and check the configuration.

    Raises:
        ConfigError: names the field, the value and the fix.
    """
    try:
        raw = yaml.safe_load(path.read_text())
        config = RuntimeConfig.model_validate(raw)
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not YAML ({error})") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        raise ConfigError(f"config: {path}: {field}: {first.get('input')!r}: {first['msg']}") from error
    if not config.token_file.is_file() or not config.token:
        raise ConfigError(f"tokenFile: {config.token_file} is missing or empty; write a random token to it")
    if config.pool.spec.base_model.path is None:
        raise ConfigError("pool.spec.baseModel.name: hub downloads are not supported by this version; set path")
    return config
