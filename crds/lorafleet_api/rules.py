"""CEL rules of the CRDs: what the API server itself refuses, with plain messages. Pure data for `generate`."""

from typing import Any

from lorafleet_api.v1alpha1.adapterrun import IMMUTABLE_FIELDS

Rule = dict[str, Any]

_REQUIRED = frozenset({"poolRef", "data"})
_FINISHED = (
    "has(oldSelf.status) && has(oldSelf.status.conditions) && "
    "oldSelf.status.conditions.exists(c, c.type == 'Finished' && c.status == 'True')"
)


def run_spec_rules() -> list[Rule]:
    """Rules on AdapterRun.spec: immutable fields, growth only, one reward."""
    rules = [_immutable(name) for name in IMMUTABLE_FIELDS]
    rules += [_grows(name) for name in ("numStep", "numEpoch")]
    rules.append(
        {
            "rule": "!oldSelf.cancel || self.cancel",
            "message": "cancel is one way and cannot be unset; create a new AdapterRun instead",
            "fieldPath": ".cancel",
        }
    )
    rules.append(
        {
            "rule": "[has(self.rmType), has(self.customRmPath), has(self.reward)].filter(x, x).size() <= 1",
            "message": "rmType, customRmPath and reward exclude each other; keep one of them",
        }
    )
    return rules


def run_rules() -> list[Rule]:
    """Rules on the whole AdapterRun: its length against what the run has already done."""
    return [
        *(_fixed_once_finished(name) for name in ("numStep", "numEpoch")),
        {
            "rule": "!has(self.spec.numStep) || has(oldSelf.spec.numStep) || !has(oldSelf.status) || "
            "!has(oldSelf.status.targetStep) || self.spec.numStep >= oldSelf.status.targetStep",
            "message": "numStep may only grow: it is below status.targetStep; cancel the run to end it earlier",
            "fieldPath": ".spec.numStep",
        },
    ]


def _immutable(name: str) -> Rule:
    rule = f"self.{name} == oldSelf.{name}"
    if name not in _REQUIRED:
        rule = f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || {rule})"
    return {
        "rule": rule,
        "message": f"{name} cannot change after creation; create a new AdapterRun instead",
        "fieldPath": f".{name}",
    }


def _fixed_once_finished(name: str) -> Rule:
    return {
        "rule": f"!({_FINISHED}) || (has(self.spec.{name}) == has(oldSelf.spec.{name}) && "
        f"(!has(self.spec.{name}) || self.spec.{name} == oldSelf.spec.{name}))",
        "message": f"{name} cannot change after the run finished; create a new AdapterRun with initFrom instead",
        "fieldPath": f".spec.{name}",
    }


def _grows(name: str) -> Rule:
    return {
        "rule": f"!has(oldSelf.{name}) || (has(self.{name}) && self.{name} >= oldSelf.{name})",
        "message": f"{name} may only grow; cancel the run to end it earlier",
        "fieldPath": f".{name}",
    }


NESTED_RULES: dict[str, list[Rule]] = {
    "run.reward": [{
        "rule": "has(self.remote) != has(self.configMapRef)",
        "message": "reward: set exactly one of remote and configMapRef",
    }],
    "run.targetModules": [{
        "rule": "self.all(m, self.exists_one(n, n == m))",
        "message": "targetModules: a projection is there more than once; list each once",
    }],
    "run.optimizer": [
        {
            "rule": "!has(self.lr) || !has(self.minLr) || self.minLr <= self.lr",
            "message": "minLr is above lr; lower minLr or raise lr",
            "fieldPath": ".minLr",
        },
        {
            "rule": "!has(self.lr) || !has(self.weightDecay) || self.lr * self.weightDecay < 1.0",
            "message": "lr times weightDecay must be below 1: each step multiplies weights by 1 minus that; "
            "lower weightDecay, for example to 0.1",
            "fieldPath": ".weightDecay",
        },
    ],
    "run.algorithm": [{
        "rule": "!has(self.tisFloor) || !has(self.tisCap) || self.tisFloor <= self.tisCap",
        "message": "tisFloor is above tisCap; lower tisFloor or raise tisCap",
        "fieldPath": ".tisFloor",
    }],
    "run.optimizer.betas": [{
        "rule": "self.all(b, b >= 0.0 && b < 1.0)",
        "message": "betas: each must be in [0, 1); for example [0.9, 0.98]",
    }],
    "pool.baseModel": [{
        "rule": "has(self.name) != has(self.path)",
        "message": "baseModel: set exactly one of name and path",
    }],
    "pool.storage": [{
        "rule": "!(has(self.path) && has(self.pvc))",
        "message": "storage: set only one of path and pvc",
    }],
}  # fmt: skip
"""Rules on nested fields, by kind and path below spec. One on two fields holds where the object sets both: what is left
to the pool's defaults the API server does not see, so the runtime checks the resolved spec again."""
