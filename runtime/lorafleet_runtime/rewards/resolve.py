"""Which function scores a run: built-in names, and dotted paths on the pool's allow list.

Called by the rollout worker when a run is opened. Imports no reward code itself; the child process does.
"""

from collections.abc import Sequence

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_api.v1alpha1.reasons import INVALID_SPEC
from lorafleet_runtime.errors import RunError

BUILT_IN = {"math": "lorafleet_runtime.rewards.math.math_reward"}
"""rmType to dotted path."""


def resolve_reward(spec: AdapterRunSpec, reward_modules: Sequence[str]) -> str:
    """The dotted path of the run's reward function.

    Args:
        spec: the run's resolved spec.
        reward_modules: the pool's rewardModules; a function's module must be one of them or below one.

    Raises:
        RunError: InvalidSpec; the reward is unknown, not allowed, not available, or lacks its label.
    """
    if spec.rm_type is not None:
        return _built_in(spec)
    if spec.custom_rm_path is not None:
        return _custom(spec.custom_rm_path, reward_modules)
    kind = "remote" if spec.reward is not None and spec.reward.remote is not None else "configMapRef"
    raise RunError(
        INVALID_SPEC, f"reward.{kind}: is not available in this version; set rmType, or customRmPath to a function"
    )


def reward_field(spec: AdapterRunSpec) -> str:
    """The field and value that chose the reward, for messages."""
    return f"rmType: {spec.rm_type!r}" if spec.rm_type is not None else f"customRmPath: {spec.custom_rm_path!r}"


def _built_in(spec: AdapterRunSpec) -> str:
    target = BUILT_IN.get(spec.rm_type or "")
    if target is None:
        raise RunError(INVALID_SPEC, f"rmType: {spec.rm_type!r} is unknown; use one of {', '.join(sorted(BUILT_IN))}")
    if spec.label_key is None:
        raise RunError(
            INVALID_SPEC, f"labelKey: rmType {spec.rm_type} compares with a label; set labelKey to its column"
        )
    return target


def _custom(path: str, reward_modules: Sequence[str]) -> str:
    module = path.rpartition(".")[0]
    if not module or not all(part.isidentifier() for part in path.split(".")):
        raise RunError(INVALID_SPEC, f"customRmPath: {path!r} is no dotted path; write it as package.module.function")
    if not any(module == entry or module.startswith(f"{entry}.") for entry in reward_modules):
        allowed = ", ".join(reward_modules) or "nothing"
        raise RunError(
            INVALID_SPEC,
            f"customRmPath: {path!r}: the pool's rewardModules allow {allowed}, not {module}; "
            "ask the pool's owner to add it",
        )
    return path
