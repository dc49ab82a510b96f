"""Check the ledger, techniques, units, hardware and errors, which everyone shares."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import typer

from headrace.cli.terminal import exit_codes
from headrace.core.errors import (
    ConfigError,
    HeadraceError,
    NoMoreThreads,
    RunError,
    Stopped,
    UnsupportedError,
    at_a_limit,
    nearest,
)
from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.costs.hardware import lookup
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.plan.technique import Card, Catalogue, Stage, Technique, check_claims

LEDGER = Ledger(
    {
        "parameters": Line(100, ("always",)),
        "gradients": Line(100, ("backward", "optimizer")),
        "0/norm": Line(30, ("loss", "backward"), 0),
        "1/norm": Line(30, ("loss",), 1),
        "logits": Line(50, ("loss",)),
    },
    {"forward": 2.0, "backward": 4.0},
)


def test_optimizers_take_from_the_trunks_and_update_in_turn() -> None:
    found = {"a": Matrix((3, 4)), "b": Matrix((2, 3), share=0.5), "c": Matrix((5, 5), by="")}
    ledger = LEDGER.with_matrices(found).updated_by("one", lambda name, m: name == "a")
    ledger = ledger.updated_by("rest", lambda name, m: True)
    assert [m.by for m in ledger.matrices.values()] == ["one", "rest", ""]
    assert {name: m.numbers for name, m in ledger.updates().items()} == {"a": 12, "b": 3}
    assert ledger.updates("rest").keys() == {"b"} and not LEDGER.matrices
    assert ledger.updating(5).updating(9).updating(7).at("optimizer") == LEDGER.at("optimizer") + 9


def test_a_ledger_is_read_at_instants() -> None:
    assert LEDGER.at("loss") == 210
    assert LEDGER.at("backward") == 230
    assert LEDGER.at("optimizer") == 200
    assert LEDGER.peak() == ("backward", 230)
    assert LEDGER.flops_per_token() == 6.0


def test_owners_are_of_the_peak_and_sum_over_layers() -> None:
    assert LEDGER.owners() == [("parameters", 100), ("gradients", 100), ("norm", 30)]
    without = LEDGER.without(["gradients"])
    assert without.peak() == ("loss", 210)
    assert without.owners() == [("parameters", 100), ("norm", 60), ("logits", 50)]


def test_edits_leave_the_ledger_as_it_was() -> None:
    before = LEDGER.at("loss")
    assert LEDGER.with_line("logits", Line(1, ("loss",))).at("loss") == before - 49
    assert LEDGER.without(["logits", "none"]).at("loss") == before - 50
    assert LEDGER.scaled(lambda name: name.endswith("norm"), 0.5).at("loss") == before - 30
    assert LEDGER.with_flops("forward", 1.0).flops == {"forward": 3.0, "backward": 4.0}
    assert LEDGER.with_flops("again", 1.0).flops_per_token() == 7.0
    assert LEDGER.at("loss") == before and LEDGER.flops_per_token() == 6.0
    with pytest.raises(FrozenInstanceError):
        LEDGER.memory = {}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (-2048, "-2.0 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (7 * 2**40, "7.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (999.6, "1k"), (1234567, "1.23M"), (2e9, "2B"), (3.5e12, "3.5T")],
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (1, "1.0 s"),
        (119.9, "119.9 s"),
        (120, "2 min"),
        (3725, "62 min"),
        (7260, "2 h 01 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_hardware_is_found_by_its_name_and_never_guessed() -> None:
    found = lookup("NVIDIA H100 PCIe")
    assert found.peak_flops("bf16") == 756e12 and found.peak_flops("fp32") == 51e12
    assert (
        lookup("nvidia h200").source and lookup("NVIDIA H100 80GB HBM3").peak_bf16_flops == 989e12
    )
    unknown = lookup("Riva TNT2")
    assert unknown.peak_flops("bf16") is None and unknown.source


def test_nearest() -> None:
    assert nearest("moun", ["muon", "lora"]) == "muon"
    assert nearest("zzz", ["b", "a"]) == "a, b"
    many = nearest("zzz", [f"{n:02}" for n in range(60)])
    assert many.startswith("00, 01, ") and many.endswith("23 and 36 more")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HeadraceError("x"), 1),
        (RunError("x"), 1),
        (ConfigError("x"), 2),
        (UnsupportedError("x"), 3),
        (Stopped("x", "", 75), 75),
    ],
)
def test_errors_have_their_exit_code(error: HeadraceError, code: int) -> None:
    assert error.exit_code == code and str(error) == "x"
    assert str(ConfigError("wrong", "right")) == "wrong\n  try: right"


def test_stages_stand_in_the_order_of_the_design() -> None:
    after = [
        Stage.MODEL,
        Stage.LINEAR,
        Stage.TENSOR,
        Stage.FREEZE,
        Stage.CHECKPOINT,
        Stage.COMPILE,
        Stage.GATE,
        Stage.MATERIALIZE,
        Stage.OPTIMIZER,
        Stage.STEP,
    ]
    assert after == sorted(after) and min(Stage) == Stage.DESIGN


class Plain(Technique[Any]):
    """A technique that answers nothing."""

    stage = Stage.STEP
    card = Card("a", "b", "c", "d", "e")


def test_a_technique_is_named_by_its_module_and_lined_by_its_docstring() -> None:
    assert Plain.name() == "test_core"
    assert Plain.line() == "A technique that answers nothing."
    for verb in (Plain().supports, Plain().predict, Plain().apply, Plain().active):
        with pytest.raises(NotImplementedError):
            verb(None)  # type: ignore[arg-type]


def test_claims_of_one_technique_alone_never_clash() -> None:
    check_claims([Plain(), Plain()])


def test_an_empty_catalogue_says_so() -> None:
    empty = Catalogue({}, {"headrace": {}})
    with pytest.raises(ConfigError, match="none installed"):
        empty.find("muon")
    assert empty.with_family({"dim": 8}) == {"dim": 8}


class PanicException(BaseException):
    """As Rust's, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("Resource temporarily unavailable"), True),
        (PanicException("The global thread pool has not been initialized.: WouldBlock"), True),
        (PanicException("index out of bounds"), False),
        (RuntimeError("NCCL error: Resource temporarily unavailable"), False),
        (OSError(11, "Resource temporarily unavailable"), False),
    ],
)
def test_threads_that_ran_out_are_one_message(
    error: BaseException, is_one: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert isinstance(at_a_limit(error), NoMoreThreads) is is_one
    raised = typer.Exit if is_one or isinstance(error, OSError) else type(error)
    with pytest.raises(raised), exit_codes(as_json=True):
        raise error
    assert ("start no more threads" in capsys.readouterr().out) is is_one
