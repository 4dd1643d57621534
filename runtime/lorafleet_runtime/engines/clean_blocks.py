"""vLLM general plugin: a KV block is zeroed before a request gets it, so nothing of its last owner is left in it.

A request writes the slots of its last block one by one, and the attention kernel reads the whole block: it gives the
unwritten slots probability 0 and multiplies. Leftovers of a run whose activations overflowed are NaN, and 0 x NaN is
NaN: that run's values would reach whoever gets its blocks next. vLLM's CPU kernel does this. FLASH_ATTN and Triton skip
or zero-fill such slots where blocks have 16 tokens; FA3 with large blocks loads them by TMA, unmasked.

vLLM can zero new blocks, in order before the pass that uses them, and does so for Mamba layers and mixed cache types
only; here its switch is always on. vLLM loads this in every process through the entry point `lorafleet_clean_blocks`;
`compat.py` asks `check` at the start of each engine. Imports vllm.
"""

import vllm
from vllm.v1.kv_cache_interface import KVCacheConfig

from lorafleet_runtime.errors import ConfigError

_SWITCH = "needs_kv_cache_zeroing"
"""Scheduler, block manager and worker all ask this property of KVCacheConfig."""

_ALWAYS = property(lambda _: True)


def register() -> None:
    """Entry point of vLLM's plugin system; called once or more in every process of vLLM.

    Raises:
        ConfigError: this version of vLLM has no such switch. vLLM does not start then.
    """
    if not isinstance(vars(KVCacheConfig).get(_SWITCH), property):
        raise ConfigError(f"vllm {vllm.__version__}: KVCacheConfig has no {_SWITCH}; adapt engines/clean_blocks.py")
    setattr(KVCacheConfig, _SWITCH, _ALWAYS)


def check() -> None:
    """That vLLM has loaded the plugin; call it once an AsyncEngineArgs was made.

    Raises:
        ConfigError: it has not, so one run's values could reach another's.
    """
    if vars(KVCacheConfig).get(_SWITCH) is not _ALWAYS:
        raise ConfigError(
            "vLLM did not load its plugin lorafleet_clean_blocks, which keeps runs apart; install lorafleet-runtime"
            " again (here: `make setup`), and name the plugin where VLLM_PLUGINS is set in the pool's env"
        )
