"""A bad adapter is refused by name before an engine sees it."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from lorafleet_runtime.errors import RunError
from lorafleet_runtime.publish.manifest import AdapterLimits, all_finite, check_adapter
from lorafleet_runtime.types import Manifest
from support.adapters import RandomAdapter, pack, random_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6), "model.layers.0.mlp.down_proj": (6, 10)}
LIMITS = AdapterLimits(4, ("q_proj", "down_proj"), SHAPES)
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def _good() -> RandomAdapter:
    return random_adapter(SHAPES, rank=4, seed=0)


def _refused(manifest: Manifest, buffer: bytes, *words: str) -> None:
    with pytest.raises(RunError) as caught:
        check_adapter(manifest, memoryview(buffer), LIMITS)
    assert caught.value.reason == "PublishError"
    for word in words:
        assert word in caught.value.message


def _repacked(tensors: dict[str, np.ndarray], *words: str, rank: int = 4) -> None:
    manifest, buffer = pack(tensors, rank, 16, ("q_proj", "down_proj"))
    _refused(manifest, buffer, *words)


def test_a_good_adapter_is_accepted() -> None:
    good = _good()
    check_adapter(good.manifest, memoryview(good.buffer), LIMITS)


def test_a_truncated_buffer_is_refused() -> None:
    good = _good()
    _refused(good.manifest, good.buffer[:-4], "buffer of bytes", str(len(good.buffer)))


def test_a_damaged_buffer_is_refused() -> None:
    good = _good()
    damaged = bytearray(good.buffer)
    damaged[5] ^= 1
    _refused(good.manifest, bytes(damaged), "digest")


def test_a_rank_above_the_pool_is_refused() -> None:
    big = random_adapter(SHAPES, rank=5, seed=0)
    _refused(big.manifest, big.buffer, "rank 5", "1 to 4")


def test_an_empty_adapter_is_refused() -> None:
    manifest, buffer = pack({}, 4, 16)
    _refused(manifest, buffer, "tensors", "empty")


def test_an_alpha_of_zero_is_refused() -> None:
    good = _good()
    _refused(replace(good.manifest, alpha=0), good.buffer, "alpha 0")


def test_a_projection_that_the_pool_does_not_serve_is_refused() -> None:
    good = _good()
    _refused(replace(good.manifest, target_modules=("q_proj", "down_proj", "lm_head")), good.buffer, "lm_head")


def test_a_projection_outside_the_manifest_is_refused() -> None:
    good = _good()
    _refused(replace(good.manifest, target_modules=("q_proj",)), good.buffer, "down_proj")


def test_a_layer_that_the_base_does_not_have_is_refused() -> None:
    tensors = _good().tensors
    tensors[Q_A.replace("layers.0", "layers.9")] = tensors.pop(Q_A)
    _repacked(tensors, "layers.9", "no such layer")


def test_a_key_that_is_no_lora_weight_is_refused() -> None:
    tensors = _good().tensors
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors.pop(Q_A)
    _repacked(tensors, "q_proj.weight", "expected base_model")


def test_half_a_pair_is_refused() -> None:
    tensors = _good().tensors
    del tensors[Q_B]
    _repacked(tensors, "q_proj", "partner")


def test_a_tensor_smaller_than_its_layer_is_refused() -> None:
    tensors = _good().tensors
    tensors[Q_A] = np.ascontiguousarray(tensors[Q_A][:, :3])
    _repacked(tensors, "q_proj.lora_A", "(4, 3)", "(4, 6)")


def test_a_rank_pattern_is_refused() -> None:
    tensors = _good().tensors
    tensors[Q_A], tensors[Q_B] = tensors[Q_A][:2].copy(), tensors[Q_B][:, :2].copy()
    _repacked(tensors, "lora_A", "(2, 6)", "(4, 6)")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float) -> None:
    tensors = _good().tensors
    tensors[Q_B][3, 1] = value
    _repacked(tensors, Q_B, "NaN or infinity")


def test_tensors_that_overlap_are_refused() -> None:
    good = _good()
    entries = list(good.manifest.tensors)
    entries[1] = replace(entries[1], offset=entries[1].offset - 4)
    _refused(replace(good.manifest, tensors=tuple(entries)), good.buffer, "offset of", "without gaps")


def test_bytes_that_no_tensor_covers_are_refused() -> None:
    good = _good()
    longer = good.buffer + bytes(8)
    manifest = replace(good.manifest, num_bytes=len(longer), digest=hashlib.sha256(longer).hexdigest())
    _refused(manifest, longer, "num_bytes", str(len(good.buffer)))


@pytest.mark.parametrize(
    ("bits", "finite"), [(0x3F80, True), (0x7F7F, True), (0x7F80, False), (0xFF80, False), (0x7FC0, False)]
)
def test_bfloat16_is_judged_by_its_exponent(bits: int, finite: bool) -> None:
    assert all_finite(memoryview(np.array([0x3F80, bits], dtype=np.uint16)).cast("B"), "bfloat16") is finite
