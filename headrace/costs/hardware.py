"""List published peaks of NVIDIA GPUs, each with its source. They are ceilings, not predictions.

Rates are dense: datasheets print twice as much for matrices with structured sparsity. Tensor rates
are those that accumulate in fp32, as torch's matmuls do. A GeForce card has half of the rate that
its chip would have, which is why its row says twice the fp32 rate where a workstation card's says
four times. NVIDIA's whitepapers print those of the larger GeForce cards; of the others the same
ratio is taken, and fp32 is processors x 128 x 2 x the boost clock of the card's specification.

One device has many names: "NVIDIA H100 80GB HBM3" is the SXM module. A row is found by words that
must all occur in the name, the most particular row first. A card that is cut down (a laptop's, a
slice of a GPU) is another device and has no row.
"""

import re
from dataclasses import dataclass, replace

from headrace.core.errors import nearest

GB, GIB = 10**9, 2**30
BF16 = (8, 0)
"""The compute capability of the first GPUs that multiply bf16."""
NO_BF16 = "has compute capability {}.{}, and bf16 products need 8.0"
OTHERS = r"ti|super|d|laptop|mobile|max-?q|mig|grid|nvl|\d+[qc]"
"""Words of a name that make it another device, where a row does not name them."""
OF_ITS_HOST = "GH200"
"""The chip whose name gives the memory of its host, not its own: "NVIDIA GH200 480GB"."""


@dataclass(frozen=True)
class Hardware:
    """Hold what is published of one device; None and "" where nothing is.

    Args:
        name: as its driver or a user says it.
        peak_half_flops: peak of 16-bit matmuls on tensor cores, dense, in FLOP/s.
        peak_fp32_flops: peak of fp32 matmuls without tensor cores, in FLOP/s.
        memory_bandwidth_bytes_per_s: of the device's memory.
        memory_bytes: of the device.
        source: where these numbers are from.
        family: whose shares of its peaks it is assumed to reach (costs/assumed.py).
        processors: multiprocessors.
        capability: CUDA's compute capability.
        sustained: share of what its family reaches in matmuls that its limit of power leaves.
    """

    name: str
    peak_half_flops: float | None
    peak_fp32_flops: float | None
    memory_bandwidth_bytes_per_s: float | None
    memory_bytes: int | None
    source: str
    family: str = ""
    processors: int = 0
    capability: tuple[int, int] = (0, 0)
    sustained: float = 1.0

    @property
    def peak_bf16_flops(self) -> float | None:
        """Return the peak FLOP/s of bf16 matmuls; None where the device has no units for them."""
        return self.peak_half_flops if self.capability >= BF16 else None

    def peak_flops(self, precision: str) -> float | None:
        """Return the peak that model FLOPs utilization divides by for a precision."""
        if precision == "bf16":
            return self.peak_bf16_flops
        return self.peak_half_flops if precision == "fp16" else self.peak_fp32_flops


@dataclass(frozen=True)
class DeviceRow:
    """A row is one line of the table; its numbers are in TFLOP/s, TB/s and GB."""

    words: str
    family: str
    capability: tuple[int, int]
    processors: int
    half: float
    fp32: float
    bandwidth: float
    memory: float
    source: str
    sustained: float = 1.0
    """See `Hardware`. 0.65 is assumed of cards of 70 to 150 W, of which arXiv 1903.07486 shows how
    a T4 of 70 W lowers its clock in matmuls."""

    def of(self, name: str) -> Hardware:
        """Return the device of that name."""
        return Hardware(
            name,
            self.half * 1e12,
            self.fp32 * 1e12,
            self.bandwidth * 1e12,
            int(self.memory * GB),
            self.source,
            self.family,
            self.processors,
            self.capability,
            self.sustained,
        )


def _geforce(
    words: str, processors: int, fp32: float, bandwidth: float, memory: float
) -> DeviceRow:
    """Return the row of a GeForce card; its series decides chip and source."""
    series = re.search(r"\b([345])0[5-9]0\b", words)
    family, capability, source = {
        "3": ("ampere_rtx", (8, 6), "NVIDIA Ampere GA102 whitepaper"),
        "4": ("ada", (8, 9), "NVIDIA Ada whitepaper"),
        "5": ("blackwell_rtx", (12, 0), "NVIDIA RTX Blackwell whitepaper"),
    }[series[1] if series else ""]
    how = f"{source} and GeForce specifications, tensor products with fp32 accumulation"
    return DeviceRow(words, family, capability, processors, 2 * fp32, fp32, bandwidth, memory, how)


ROWS: tuple[DeviceRow, ...] = (
    DeviceRow("H200 NVL", "hopper", (9, 0), 132, 835.5, 60, 4.8, 141, "NVIDIA H200 NVL datasheet"),
    DeviceRow(
        "H200", "hopper", (9, 0), 132, 989, 67, 4.8, 139.80 * GIB / GB, "NVIDIA H200 SXM datasheet"
    ),
    DeviceRow(
        "GH200 144G", "hopper", (9, 0), 132, 990, 67, 4.9, 144, "NVIDIA GH200 datasheet, HBM3e"
    ),
    DeviceRow("GH200", "hopper", (9, 0), 132, 990, 67, 4.0, 96, "NVIDIA GH200 datasheet, HBM3"),
    DeviceRow(
        "H100 PCIe", "hopper", (9, 0), 114, 756, 51, 2.0, 80, "NVIDIA H100 datasheet, PCIe column"
    ),
    DeviceRow("H100 NVL", "hopper", (9, 0), 132, 835.5, 60, 3.9, 94, "NVIDIA H100 NVL datasheet"),
    DeviceRow("H100", "hopper", (9, 0), 132, 989, 67, 3.35, 80, "NVIDIA H100 SXM datasheet"),
    DeviceRow(
        "B200", "blackwell", (10, 0), 148, 2250, 75, 8.0, 180, "NVIDIA DGX B200 datasheet, per GPU"
    ),
    DeviceRow(
        "A100 PCIe 80GB",
        "ampere",
        (8, 0),
        108,
        312,
        19.5,
        1.935,
        80,
        "NVIDIA A100 datasheet, 80 GB PCIe column",
    ),
    DeviceRow(
        "A100 40GB",
        "ampere",
        (8, 0),
        108,
        312,
        19.5,
        1.555,
        40,
        "NVIDIA A100 datasheet of the 40 GB modules",
    ),
    DeviceRow(
        "A100",
        "ampere",
        (8, 0),
        108,
        312,
        19.5,
        2.039,
        80,
        "NVIDIA A100 datasheet, 80 GB SXM column",
    ),
    DeviceRow(
        "A10G", "ampere_rtx", (8, 6), 80, 70, 35, 0.6, 24, "NVIDIA A10G datasheet, for AWS G5"
    ),
    DeviceRow("A10", "ampere_rtx", (8, 6), 72, 125, 31.2, 0.6, 24, "NVIDIA A10 datasheet", 0.65),
    DeviceRow(
        "A6000", "ampere_rtx", (8, 6), 84, 154.8, 38.7, 0.768, 48, "NVIDIA RTX A6000 datasheet"
    ),
    DeviceRow(
        "6000 Ada",
        "ada",
        (8, 9),
        142,
        364.2,
        91.1,
        0.96,
        48,
        "NVIDIA RTX 6000 Ada datasheet and Ada whitepaper",
    ),
    DeviceRow("L40S", "ada", (8, 9), 142, 362, 91.6, 0.864, 48, "NVIDIA L40S datasheet"),
    DeviceRow(
        "L4",
        "ada",
        (8, 9),
        58,
        121,
        30.3,
        0.3,
        24,
        "NVIDIA L4 datasheet, half of its sparse rates",
        0.65,
    ),
    DeviceRow("T4", "turing", (7, 5), 40, 65, 8.1, 0.32, 16, "NVIDIA T4 datasheet", 0.65),
    DeviceRow(
        "V100S", "volta", (7, 0), 80, 130, 16.4, 1.134, 32, "NVIDIA V100 datasheet, V100S column"
    ),
    DeviceRow(
        "V100 PCIe", "volta", (7, 0), 80, 112, 14, 0.9, 16, "NVIDIA V100 datasheet, PCIe column"
    ),
    DeviceRow(
        "V100", "volta", (7, 0), 80, 125, 15.7, 0.9, 16, "NVIDIA V100 datasheet, SXM2 column"
    ),
    _geforce("RTX 5090", 170, 104.8, 1.792, 32),
    _geforce("RTX 5080", 84, 56.3, 0.96, 16),
    _geforce("RTX 5070 Ti", 70, 43.9, 0.896, 16),
    _geforce("RTX 5070", 48, 30.9, 0.672, 12),
    _geforce("RTX 4090 D", 114, 73.5, 1.008, 24),
    _geforce("RTX 4090", 128, 82.6, 1.008, 24),
    _geforce("RTX 4080 SUPER", 80, 52.2, 0.736, 16),
    _geforce("RTX 4080", 76, 48.7, 0.7168, 16),
    _geforce("RTX 4070 Ti SUPER", 66, 44.1, 0.672, 16),
    _geforce("RTX 4070 Ti", 60, 40.1, 0.504, 12),
    _geforce("RTX 4070 SUPER", 56, 35.5, 0.504, 12),
    _geforce("RTX 4070", 46, 29.1, 0.504, 12),
    _geforce("RTX 4060 Ti", 34, 22.1, 0.288, 8),
    _geforce("RTX 4060", 24, 15.1, 0.272, 8),
    _geforce("RTX 3090 Ti", 84, 40.0, 1.008, 24),
    _geforce("RTX 3090", 82, 35.6, 0.936, 24),
    _geforce("RTX 3080 Ti", 80, 34.1, 0.912, 12),
    _geforce("RTX 3080", 68, 29.8, 0.76, 10),
    _geforce("RTX 3070 Ti", 48, 21.7, 0.608, 8),
    _geforce("RTX 3070", 46, 20.3, 0.448, 8),
    _geforce("RTX 3060 Ti", 38, 16.2, 0.448, 8),
    _geforce("RTX 3060", 28, 12.7, 0.36, 12),
)
NAMES = tuple(row.words for row in ROWS)
"""Names of the devices that can be asked for."""
ASSUMED = ", ".join((*(n for n in NAMES if "RTX" not in n), "RTX 3060 to 5090"))
"""Names that can be asked for, as a message lists them."""


def lookup(device_name: str) -> Hardware:
    """Return the row of a device; unknown peaks are None, never guessed.

    The memory that a name gives, as in "Tesla V100-PCIE-32GB", counts before the row's.
    """
    row = next((row for row in ROWS if _is_of(row.words, device_name)), None)
    if row is None:
        return Hardware(device_name, None, None, None, None, "no published peak for this device")
    hardware, size = row.of(device_name), re.search(r"(\d+)\s*GB\b", device_name, re.IGNORECASE)
    if size is None or _has(OF_ITS_HOST, device_name) or int(size[1]) * GB == hardware.memory_bytes:
        return hardware
    same = abs(int(size[1]) * GB / (hardware.memory_bytes or 1) - 1) < 0.02  # "H200 141GB"
    return hardware if same else replace(hardware, memory_bytes=int(size[1]) * GB)


def near(device_name: str) -> str:
    """Return the name of the row that is most like this one; "" where none is."""
    own = re.sub(r"(?i)\b(nvidia|geforce|tesla|quadro|gpu)\b", "", device_name).strip()
    own = re.sub(r"(?i)\s*laptop.*$|\s*max-?q.*$", "", own)
    series = {name.removeprefix("RTX "): name for name in NAMES}
    whole = {name: name for name in NAMES} | series
    return whole.get(nearest(own, whole), "") if own else ""


def _is_of(words: str, name: str) -> bool:
    """Return whether a name has all of these words, and none that makes it another device."""
    if not all(_has(word, name) for word in words.split()):
        return False
    other = re.findall(rf"(?<![a-z0-9])(?:{OTHERS})(?![a-z0-9])", name.lower())
    return not set(other) - set(words.lower().split())


def _has(word: str, name: str) -> bool:
    return (
        re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", name, re.IGNORECASE) is not None
    )
