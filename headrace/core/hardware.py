"""Peaks of devices, each with its source. They are ceilings for ratios, never predictions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One device's ceilings: dense matrix rates in FLOP/s, memory bandwidth in bytes/s."""

    name: str
    peak_bf16_flops: float | None
    peak_fp32_flops: float | None
    memory_bandwidth_bytes_per_s: float | None
    memory_bytes: int | None
    source: str

    def peak_flops(self, precision: str) -> float | None:
        """The peak that model FLOPs utilization divides by for "bf16" or "fp32"."""
        return self.peak_bf16_flops if precision == "bf16" else self.peak_fp32_flops


_GPUS = (
    # (substring of the device's name, bf16 dense, fp32, bytes/s, bytes, source)
    ("H200", 989e12, 67e12, 4.8e12, 141e9, "NVIDIA H200 SXM datasheet"),
    ("H100 PCIe", 756e12, 51e12, 2.0e12, 80e9, "NVIDIA H100 datasheet, PCIe column"),
    ("H100", 989e12, 67e12, 3.35e12, 80e9, "NVIDIA H100 SXM datasheet"),
    ("B200", 2250e12, 75e12, 8.0e12, 180e9, "NVIDIA DGX B200 datasheet, per GPU"),
    ("A100", 312e12, 19.5e12, 2.0e12, 80e9, "NVIDIA A100 80 GB datasheet"),
    ("L40S", 362e12, 91.6e12, 0.864e12, 48e9, "NVIDIA L40S datasheet"),
    ("RTX 4090", 165e12, 82.6e12, 1.008e12, 24e9, "NVIDIA Ada whitepaper, fp32 accumulate"),
    ("RTX 3090", 71e12, 35.6e12, 0.936e12, 24e9, "NVIDIA GA102 whitepaper, fp32 accumulate"),
)


def lookup(device_name: str) -> Hardware:
    """The entry whose name occurs in `device_name`; unknown peaks are None, never guessed."""
    for key, bf16, fp32, bandwidth, memory, source in _GPUS:
        if key.lower() in device_name.lower():
            return Hardware(device_name, bf16, fp32, bandwidth, int(memory), source)
    return Hardware(device_name, None, None, None, None, "no published peak for this device")
