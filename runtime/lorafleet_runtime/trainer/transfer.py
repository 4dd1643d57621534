"""Copies to the device that do not wait for its queue. Called where a pass is put together."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, ordered before the work that is queued after this call.

    A plain copy from pageable memory would wait until the device has finished all it was given.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
