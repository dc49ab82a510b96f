"""`data pack` counts each policy of a plan's text, names one, and its command is the plan's."""

from collections.abc import Callable
from typing import Any


def test_pack_counts_names_and_commands(
    call: Callable[..., Any], say: Callable[..., tuple[str, str]], tiny_demo: list[str]
) -> None:
    """Rows of 1400 tokens have two whole documents of these and a little padding."""
    words = [*tiny_demo, "data.sequence_length=1400", "batch.tokens=1400", "eval.tokens=1400"]
    told = call("data", "pack", *words)
    by_name = {row["policy"]: row for row in told["policies"]}
    assert set(by_name) == {"cut", "document_packing", "best_fit_packing", "pad"}
    assert by_name["best_fit_packing"]["needless_splits"] == 0
    assert by_name["cut"]["needless_splits"] > 0 and by_name["cut"]["padding_fraction"] == 0
    assert by_name["pad"]["padding_fraction"] > by_name["best_fit_packing"]["padding_fraction"]
    assert by_name["document_packing"]["attention_flops"] < by_name["cut"]["attention_flops"]
    assert told["best"] == "document_packing" and told["why"] == "too much padding"
    assert told["command"].startswith("headrace train demo")
    assert told["command"].endswith("--with document_packing")
    out, _ = say("data", "pack", *words)
    assert "document_packing wins" in out and out.strip().endswith(told["command"])


def test_the_command_takes_out_what_lost(call: Callable[..., Any], tiny_demo: list[str]) -> None:
    """Rows of 8 are far shorter than the documents: nothing is worth separating."""
    told = call(
        "data", "pack", *tiny_demo, "techniques.best_fit_packing={}", "data.sequence_length=8"
    )
    assert told["best"] == "cut" and told["why"] == "nothing to separate"
    assert "--without best_fit_packing" in told["command"]


def test_eval_tells_its_stride(call: Callable[..., Any], say: Callable[..., Any]) -> None:
    plain, wider = call("eval", "demo"), call("eval", "demo", "--stride", "4")
    assert (wider["stride"], wider["least_context"]) == (4, 12) and "stride" not in plain
    assert (wider["tokens"], wider["bytes"]) == (plain["tokens"], plain["bytes"])
    assert wider["loss_nats"] != plain["loss_nats"]
    out, _ = say("eval", "demo", "--stride", "4")
    assert "least_context" in out
    refused = call("eval", "demo", "--stride", "17", code=2)
    assert "--stride 8" in refused["remedy"]
