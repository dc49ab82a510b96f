"""Links between ranks: what is assumed of them, how far it reaches, and what is said of both."""

import pytest
from facts import tells
from test_ranks_predicted import H200, linked, plan_of, seen

from headrace.core.errors import UnsupportedError
from headrace.costs.links import NODE, collective_s, probe_command, says


@pytest.mark.parametrize(
    ("name", "faster", "source"),
    [
        ("NVIDIA B200", "NVIDIA H200", "NVLink 5"),
        ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVLink 4"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVLink 3"),
        ("NVIDIA H100 PCIe", "NVIDIA L40S", "PCIe 5.0"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVLink 4"),
    ],
)
def test_assumed_links_are_of_their_datasheets(name: str, faster: str, source: str) -> None:
    one, two = (collective_s((), n, "all_gather", 2**30, 8) for n in (name, faster))
    assert one < two and tells(says((), name, 8), "assumed", source)


@pytest.mark.parametrize(("ranks", "unknown"), [(8, False), (9, True), (1024, True)])
def test_what_is_said_of_links_is_what_is_predicted(ranks: int, unknown: bool) -> None:
    """Check that rates of one host are not claimed between ranks that no rate is known for."""
    found = seen(plan_of("160m", f"mesh.data={ranks}", f"batch.tokens={ranks * 2048}"))
    line = found.rates.between_ranks.splitlines()[-1]
    assert tells(line, f"between {ranks} ranks", "360 GB/s", "80% of 450 GB/s")
    assert (found.time.step_s is None) == unknown
    nothing = "of the network between hosts nothing is assumed"
    assert tells(line, f"inside a host of {NODE}", nothing) == unknown
    if unknown:
        assert tells(found.time.unknown, f"{NODE} inside a host", nothing)
        assert f"{probe_command(ranks)} (on those machines)" in found.time.unknown
    with pytest.raises(UnsupportedError, match="measured for 4, and between more of them nothing"):
        collective_s(linked(ranks=4).links, H200.name, "all_reduce", 1, 8)
    both = (*linked(1e9, ranks=2).links, *linked(2e9, ranks=4).links)
    assert tells(says(both, H200.name, 2), "1 GB/s", "over 2 ranks")
    assert tells(says(both, H200.name, 8), "2 GB/s", "over 4 ranks", "nothing is assumed")
