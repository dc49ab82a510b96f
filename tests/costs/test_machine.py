"""The rates of a device: what is assumed of an H200 meets what was measured on one, and files."""

import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from facts import in_order

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.costs.hardware import NAMES, lookup
from headrace.costs.machine import PROBE, Machine
from headrace.costs.rates import AttentionPoint, MatmulPoint, StreamPoint, StreamRates

ROOT = Path(__file__).parents[2]
H200 = Machine.assumed("NVIDIA H200")
CPU = Machine.assumed("cpu")
SIZES = (1, 16, 64, 100, 128, 129, 500, 512, 1000, 2048, 4097, 32768)


def rate(precision: str, m: int, n: int, k: int) -> float:
    """Return the TFLOP/s at which an H200 is predicted to multiply matrices of this shape."""
    return 2e-12 * m * n * k / H200.matmul_s(precision, m, n, k)


def test_products_of_an_h200_are_as_measured() -> None:
    for precision, measured in {"bf16": 791, "fp8": 1502, "tf32": 408, "fp32": 51}.items():
        assert rate(precision, 8192, 8192, 8192) == pytest.approx(measured, rel=0.03)
    assert H200.traffic_s(2**32) == pytest.approx(2**32 / 4.27e12, rel=0.1)


@pytest.mark.parametrize(
    ("shape", "rates"),
    [
        ((32, 12, 12, 2048, 64), {"flash": (268, 225), "cudnn": (395, 332), "flex": (314, 226)}),
        ((8, 32, 8, 4096, 64), {"flash": (292, 245), "cudnn": (442, 384)}),
        ((4, 32, 8, 8192, 128), {"flash": (342, 298), "cudnn": (655, 547)}),
        ((1, 32, 8, 32768, 128), {"flash": (348, 320), "cudnn": (610, 541)}),
        ((64, 12, 12, 512, 64), {"flash": (146, 135), "cudnn": (237, 163), "efficient": (94, 79)}),
        ((4, 32, 32, 8192, 128), {"efficient": (174, 133)}),
    ],
)
def test_attention_of_an_h200_is_as_measured(
    shape: tuple[int, ...], rates: dict[str, tuple[float, float]]
) -> None:
    rows, heads, kv_heads, length, features = shape
    teraflops = 2e-12 * rows * heads * length**2 * features
    for kernel, (forward, backward) in rates.items():
        for way, work, measured in ((False, 1.0, forward), (True, 2.5, backward)):
            seconds = H200.attention_s(
                kernel,
                rows=rows,
                heads=heads,
                kv_heads=kv_heads,
                length=length,
                features=features,
                causal=True,
                backward=way,
            )
            assert work * teraflops / seconds == pytest.approx(measured, rel=0.1), (kernel, way)


@pytest.mark.parametrize(
    ("tokens", "layers", "weights", "measured_s"),
    [
        (65536, 12, [(2304, 768), (768, 768), (4096, 768), (768, 2048)], 0.0610),
        (32768, 16, [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)], 0.3339),
    ],
)  # results/kernels.jsonl, the newest rows of "160m" and "1b": never used to set a rate
def test_the_products_of_a_whole_step_take_what_a_profile_says(
    tokens: int, layers: int, weights: list[tuple[int, int]], measured_s: float
) -> None:
    head = (32768, 768) if layers == 12 else (128256, 2048)
    found_s = 0.0
    for count, (n, k) in [*((layers, w) for w in weights), (1, head)]:
        ways = ((tokens, n, k), (tokens, k, n), (n, k, tokens))
        found_s += count * sum(H200.matmul_s("bf16", *sizes) for sizes in ways)
    assert found_s == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize("machine", [H200, CPU], ids=["H200", "CPU"])
def test_more_work_never_takes_less_time(machine: Machine) -> None:
    for other, precision in product((64, 1000, 8192), [p.precision for p in machine.matmuls]):
        for at in range(3):
            sizes = [[other] * at + [size] + [other] * (2 - at) for size in SIZES]
            times = [machine.matmul_s(precision, *one) for one in sizes]
            assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times)), (precision, at)
    assert all(machine.traffic_s(a) <= machine.traffic_s(b) for a, b in pairwise(SIZES))
    assert machine.link_s(1000, True) < machine.link_s(10**9, True)
    for kernel, backward, causal in product(machine.kernels(False), (False, True), (False, True)):
        for name, values in {
            "length": SIZES,
            "rows": SIZES,
            "heads": SIZES,
            "features": (16, 64, 128, 256),
        }.items():
            shape = {"rows": 2, "heads": 8, "kv_heads": 8, "length": 512, "features": 64}
            times = [
                machine.attention_s(
                    kernel, **{**shape, name: value}, causal=causal, backward=backward
                )
                for value in values
            ]
            assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times)), (kernel, name)


def test_short_rows_of_attention_are_slower_by_their_beginnings() -> None:
    def plain_s(length: int) -> float:
        shape = {"rows": 2**20 // length, "heads": 8, "kv_heads": 8, "features": 64}
        one = replace(H200, attention=(replace(H200.attention[0], points=()),))
        return one.attention_s("cudnn", **shape, length=length, causal=True, backward=False)

    rate = {length: length / plain_s(length) for length in (512, 2048, 8192, 65536)}
    assert rate[512] < 0.75 * rate[2048] < 0.75 * rate[8192]
    assert rate[8192] == pytest.approx(rate[65536], rel=0.06)


def test_a_last_round_that_is_not_full_costs_a_full_one() -> None:
    few = replace(CPU, processors=4)
    one, two = few.matmul_s("fp32", 32 * 4, 64, 4096), few.matmul_s("fp32", 32 * 5, 64, 8192)
    assert two > 1.5 * one


def test_measured_points_are_met_and_lie_between_their_neighbours() -> None:
    small, large = 3e-5, 2e-3
    known = replace(
        H200.matmuls[0],
        points=(MatmulPoint(512, 512, 512, small), MatmulPoint(4096, 4096, 4096, large)),
    )
    machine = replace(H200, matmuls=(known,)).fitted()
    assert machine.matmul_s("bf16", 512, 512, 512) == pytest.approx(small)
    assert machine.matmul_s("bf16", 4096, 4096, 4096) == pytest.approx(large)
    assert small < machine.matmul_s("bf16", 1536, 1536, 1536) < large
    beyond = machine.matmul_s("bf16", 16384, 16384, 16384)
    assert beyond == pytest.approx(64 * large, rel=0.1)
    long_s, short_s = (machine.matmul_s("bf16", n, n, n, plain=True) for n in (4096, 512))
    assert long_s == pytest.approx(large, rel=1e-3)
    assert short_s != pytest.approx(small, rel=0.1)
    both = (
        AttentionPoint(1, 8, 8, 1024, 64, True, 1e-3),
        AttentionPoint(1, 8, 8, 1024, 64, False, 1.4e-3),
    )
    mixed = replace(H200, attention=(replace(H200.attention[0], points=both),)).fitted()
    for causal, seconds in ((True, 1e-3), (False, 1.4e-3)):
        assert mixed.attention_s(
            mixed.attention[0].kernel,
            rows=1,
            heads=8,
            kv_heads=8,
            length=1024,
            features=64,
            causal=causal,
            backward=mixed.attention[0].backward,
        ) == pytest.approx(seconds)


def test_a_stream_meets_its_points_rises_and_goes_on_at_its_rate() -> None:
    stream = StreamRates(
        1e-6, 1e9, (StreamPoint(10_000, 4e-6), StreamPoint(1000, 5e-6), StreamPoint(10**6, 1e-3))
    )
    assert stream.seconds(1) == stream.seconds(1000) == pytest.approx(5e-6)
    assert stream.seconds(10_000) == pytest.approx(5e-6)  # not the lucky 4
    assert 5e-6 < stream.seconds(100_000) < 1e-3
    assert stream.seconds(3 * 10**6) == pytest.approx(3e-3)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    for machine in (H200, CPU):
        machine.write(tmp_path / "of" / "it.json")
        assert Machine.read(tmp_path / "of" / "it.json") == machine
    assert [p.name for p in (tmp_path / "of").iterdir()] == ["it.json"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda t: t.update(launch_s="fast"), "launch_s is 'fast', not a number above 0"),
        (lambda t: t.update(launch_s=float("nan")), "launch_s is nan"),
        (lambda t: t.update(processors=0), "processors is 0, not a whole number above 0"),
        (lambda t: t.update(processors=True), "processors is True"),
        (lambda t: t.update(context_bytes=-1), "context_bytes is -1"),
        (lambda t: t.update(format=1), "format 1, and 3 is read here"),
        (lambda t: t.update(extra=1), "extra is not a key of it"),
        (lambda t: t.pop("name"), "name is missing"),
        (lambda t: t.update(source="hearsay"), "source is 'hearsay', not one of datasheet, probes"),
        (lambda t: t.update(traffic=[]), "traffic is [], not a table"),
        (lambda t: t["products"][1].update(points=3), "products[1].points is 3, not a list"),
        (
            lambda t: t["attention"][0]["points"][0].pop("rows"),
            "attention[0].points[0].rows is missing",
        ),
    ],
)
def test_a_bad_file_is_one_clear_error(change, found: str, tmp_path: Path) -> None:
    told = json.loads(H200.to_json())
    change(told)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError) as error:
        Machine.read(path)
    assert found in error.value.message and str(path) in error.value.message
    assert error.value.remedy.text == "headrace probe"


@pytest.mark.parametrize("text", ["", "[" * 10_000, "[]", "\x00", '{"format": 2}'])
def test_a_damaged_file_too(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    for one in (path, tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match=in_order(one, "rates")) as told:
            Machine.read(one)
        assert told.value.remedy.text == PROBE


def test_what_a_device_lacks_is_refused_and_never_guessed() -> None:
    a100 = Machine.assumed("NVIDIA A100-SXM4-80GB")
    with pytest.raises(UnsupportedError, match=in_order("products", "fp8", "datasheet")):
        a100.matmul_s("fp8", 512, 512, 512)
    with pytest.raises(UnsupportedError, match="attention by flash4"):
        a100.attention_s(
            "flash4",
            rows=1,
            heads=1,
            kv_heads=1,
            length=128,
            features=64,
            causal=True,
            backward=False,
        )
    for name in ("Tesla T4", "Tesla V100-SXM2-32GB"):
        with pytest.raises(UnsupportedError, match=in_order("products", "bf16", "datasheet")):
            Machine.assumed(name).matmul_s("bf16", 512, 512, 512)
    for name, near in {
        "Riva TNT2": PROBE,
        "NVIDIA GeForce RTX 4090 Laptop GPU": "RTX 4090",
        "4080 Supr": "4080 SUPER",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb": PROBE,
        "L4S": "L40S",
    }.items():
        with pytest.raises(UnsupportedError, match=in_order("nothing", name)) as error:
            Machine.assumed(name)
        assert near in error.value.remedy.text, (name, error.value.remedy.text)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_assumed_says_so(name: str) -> None:
    machine = Machine.assumed(f"NVIDIA {name}")
    assert machine.source == "datasheet" and "assumed" in machine.says
    assert "datasheet" in machine.says or "whitepaper" in machine.says
    assert machine.memory_bytes > machine.context_bytes > 0
    assert machine.traffic_s(2**30) > 2**30 / (lookup(name).memory_bandwidth_bytes_per_s or 0)
    for known in machine.matmuls:
        assert machine.matmul_s(known.precision, 4096, 4096, 4096) > 0
    assert machine.kernels(False) and machine.kernels(False) == machine.kernels(True)


def test_a_devices_row_is_found_by_the_name_that_its_driver_says() -> None:
    bf16 = {
        "NVIDIA H200": 989,
        "NVIDIA H200 NVL": 835.5,
        "NVIDIA GH200 480GB": 990,
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA H100 NVL": 835.5,
        "NVIDIA B200": 2250,
        "NVIDIA A100-SXM4-40GB": 312,
        "NVIDIA A100 80GB PCIe": 312,
        "NVIDIA A10": 125,
        "NVIDIA A10G": 70,
        "NVIDIA L4": 121,
        "NVIDIA L40S": 362,
        "NVIDIA RTX A6000": 154.8,
        "NVIDIA RTX 6000 Ada Generation": 364.2,
        "NVIDIA GeForce RTX 3090": 71.2,
        "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA GeForce RTX 5090": 209.6,
    }
    for name, teraflops in bf16.items():
        assert lookup(name).peak_bf16_flops == pytest.approx(teraflops * 1e12), name
    memory = {
        "NVIDIA A100-SXM4-40GB": (1.555, 40),
        "NVIDIA A100 80GB PCIe": (1.935, 80),
        "NVIDIA A100-SXM4-80GB": (2.039, 80),
        "Tesla V100-SXM2-32GB": (0.9, 32),
        "Tesla V100-PCIE-16GB": (0.9, 16),
        "NVIDIA GH200 480GB": (4.0, 96),
        "NVIDIA GH200 144G HBM3e": (4.9, 144),
        "NVIDIA H100 80GB HBM3": (3.35, 80),
    }
    for name, (rate, size) in memory.items():
        found = lookup(name)
        assert found.memory_bandwidth_bytes_per_s == pytest.approx(rate * 1e12), name
        assert found.memory_bytes == size * 10**9, name
    for other in (
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L40",
        "NVIDIA A10-24Q",
        "A1000",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4060 Ti D",
    ):
        assert not lookup(other).family, other


def test_only_devices_with_units_for_bf16_have_a_peak_of_it() -> None:
    t4 = lookup("Tesla T4")
    assert (t4.peak_flops("bf16"), t4.peak_flops("fp16"), t4.peak_flops("fp32")) == (
        None,
        65e12,
        8.1e12,
    )
    assert all(
        lookup(name).peak_bf16_flops for name in NAMES if not name.startswith(("T4", "V100"))
    )


def test_memory_of_an_h200_is_as_its_driver_reports_it() -> None:
    assert H200.memory_bytes == pytest.approx(139.8 * 2**30)


def test_what_is_assumed_of_an_h100_is_near_what_its_probes_told() -> None:
    probed = Machine.read(ROOT / "results" / "machines" / "h100-2026-11-25.json")
    assumed = Machine.assumed(probed.name)
    size = (8192, 2048, 32768)
    for precision, off in {"bf16": 0.03, "fp8": 0.03, "tf32": 0.03, "fp32": 0.07}.items():
        times = [one.matmul_s(precision, *size, plain=True) for one in (assumed, probed)]
        assert times[0] == pytest.approx(times[1], rel=off), precision
    assert assumed.traffic_s(2**31) == pytest.approx(probed.traffic_s(2**31), rel=0.03)
    for known in probed.attention:
        if known.kernel != "math":
            ratios = [
                assumed.attention_s(
                    known.kernel,
                    rows=p.rows,
                    heads=p.heads,
                    kv_heads=p.kv_heads,
                    length=p.length,
                    features=p.features,
                    causal=p.causal,
                    backward=known.backward,
                )
                / p.seconds
                for p in known.points
            ]
            assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.06), known.what
    assert assumed.context_bytes == probed.context_bytes
