"""Runs each kernel once when a trainer starts, so that what cannot work here is said then and not in a run's batch.

Called by model.py on CUDA. It also takes the compilation of the usual variants out of the first batch.
"""

import torch

from lorafleet_runtime.errors import ConfigError
from lorafleet_runtime.trainer.kernels.attention import attend, make_sequences
from lorafleet_runtime.trainer.kernels.lora import Job, add_gradients, make_tables, narrow, widen
from lorafleet_runtime.trainer.kernels.rotary import norm_rotate
from lorafleet_runtime.trainer.kernels.softmax import RowTokens, row_statistics, write_gradient
from lorafleet_runtime.trainer.kernels.swiglu import swiglu


def check_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, one_call: bool) -> None:
    """Compile and run them forward and backward on 16 rows.

    Args:
        device: of the model.
        dtype: compute type, bfloat16 or float32.
        head_dim: of the model.
        one_call: attention is that of kernels/attention.py.

    Raises:
        ConfigError: one cannot be compiled or run.
    """
    try:
        _elementwise(device, dtype, head_dim)
        if dtype == torch.bfloat16:
            _lora(device, dtype)
        if one_call:
            q, k, v = (torch.ones(16, n, head_dim, device=device, dtype=dtype, requires_grad=True) for n in (2, 1, 1))
            sequences = make_sequences([(4, (6, 6))], device)
            assert sequences is not None
            torch.autograd.backward(attend(q, k, v, sequences).sum())
        torch.cuda.synchronize(device)
    except Exception as error:
        raise ConfigError(
            f"trainer: its CUDA kernels do not run on {torch.cuda.get_device_name(device)}: {error}; they are compiled "
            "on first use, so the trainer's image needs a C compiler (gcc and the headers of Python), and a Triton "
            "and a driver that know this GPU"
        ) from error


def _elementwise(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    x = torch.ones(16, 64, device=device, dtype=dtype, requires_grad=True)
    torch.autograd.backward(swiglu(x).sum())
    heads = torch.ones(16, 2, head_dim, device=device, dtype=dtype, requires_grad=True)
    table = torch.ones(16, head_dim, device=device, dtype=dtype)
    torch.autograd.backward(norm_rotate(heads, table[0], 1e-6, table, table).sum())
    logits, scale = torch.ones(16, 64, device=device, dtype=dtype), torch.ones(16, device=device)
    labels = torch.arange(17, device=device)
    write_gradient(logits, scale, row_statistics(logits, scale)[0], RowTokens(labels, labels[:16], scale))


def _lora(device: torch.device, dtype: torch.dtype) -> None:
    """Rank 16 on 64 columns, as A and as B."""
    matrix, grad = torch.ones(16, 64, device=device, dtype=dtype), torch.zeros(16, 64, device=device)
    wide, h = torch.ones(16, 64, device=device, dtype=dtype), torch.ones(16, 16, device=device, dtype=dtype)
    for strides in ((64, 1), (1, 16)):
        job = Job(0, 16, matrix.data_ptr(), grad.data_ptr(), 0, 16, 64, *strides, 0, 64, 0, 0, 1.0)
        for table in make_tables([job], device, matrix.element_size()):
            narrow(wide, h, table, 0)
            widen(h, wide, table, 0)
            add_gradients(wide, h, table, 0)
