"""The contract suite's fixtures: where data lies, and the device of each test.

A test that takes `device` runs on the CPU and, marked `gpu`, on a GPU. One that takes `variant`
runs for every technique that runs on that device, with every choice of its knobs.
"""

from pathlib import Path

import house
import pytest
import torch

DEVICES = ("cpu", "cuda")


@pytest.fixture(scope="session", autouse=True)
def data(corpus: Path, prepared_folder: Path) -> None:
    """Prepare the corpus of all tests, shared by all tiny plans."""
    house.put_data_in(str(corpus), str(prepared_folder))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a user's folder, in which later tests find what earlier ones kept."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept in a user's folder, as compiled code is, stays out of the tester's own."""
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture(autouse=True)
def device_is_here(request: pytest.FixtureRequest) -> None:
    """A test marked `gpu` needs one."""
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def marks_of(device: str, *, slow: bool = False) -> list[pytest.MarkDecorator]:
    """Return the marks of a test on `device`."""
    return [pytest.mark.gpu] * (device == "cuda") + [pytest.mark.slow] * slow


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill `device` and `variant`, but for tests that fill them otherwise."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if any("device" in names or "variant" in names for names in given):
        return
    if "variant" in metafunc.fixturenames:
        marks = metafunc.config.getoption("markexpr")
        here = DEVICES[:1] if "not gpu" in marks else DEVICES
        late = {"cpu"} if metafunc.definition.get_closest_marker("knobs_slow") else set()
        metafunc.parametrize(
            ("device", "variant"),
            [
                pytest.param(
                    device,
                    variant,
                    id=f"{device}-{variant}",
                    marks=marks_of(
                        device,
                        slow=variant.dear
                        or (variant.turned and device in late)
                        or house.is_a_knob_of_a_graph(variant, device),
                    ),
                )
                for device in here
                for name in house.names_on(device)
                for variant in house.variants(name, device)
            ],
        )
    elif "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [pytest.param(d, marks=marks_of(d)) for d in DEVICES])
