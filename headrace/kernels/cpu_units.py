"""What a processor multiplies in hardware."""

import torch


def bf16_units() -> list[str]:
    """Return the names of the processor's units that multiply bf16; without one it is emulated."""
    cpu = torch.cpu
    units = {"AMX": cpu._is_amx_tile_supported(), "AVX512-BF16": cpu._is_avx512_bf16_supported()}
    return [name for name, has in units.items() if has]
