"""Several adapters on one base: one is chosen by name, and computes what its run computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def several(call: Callable[..., Any], tiny_demo: list[str], workshop: Path) -> None:
    """Runs `one` and `two` with adapters on the weights of `demo`, and `one` as a folder too."""
    if (workshop / "runs" / "two").exists():
        return
    call("export", "demo", "--to", "hf", "--output", "base")
    shape = ("model.", "data.vocab")
    words = [word for word in tiny_demo if not word.startswith(shape)]
    words += ["model.pretrained=base", "data.tokenizer=base", "optimizer.lr=0.05", "goal.steps=3"]
    call("train", *words, "name=one", "--with", "lora", "techniques.lora.rank=2")
    knobs = "techniques.qlora={rank = 3, base = 'int8', train_also = ['head']}"
    call("train", *words, "name=two", "seed=4", knobs)
    call("export", "one", "--to", "peft", "--output", "runs/two/adapters/first")


@pytest.mark.parametrize("base", ["demo", "one", "two"])
def test_an_adapter_is_chosen_by_name(several: None, call: Callable[..., Any], base: str) -> None:
    """Whatever run names the base, the text and the loss are those of the adapter's own run."""
    talk = ("--prompt", "river", "--temperature", "0", "--tokens", "12")
    texts, losses = {}, {}
    for name in ("one", "two"):
        texts[name] = call("sample", name, *talk)["text"]
        losses[name] = call("eval", name)["loss_nats"]
        assert call("sample", base, "--adapter", name, *talk)["text"] == texts[name]
        scored = call("eval", base, "--adapter", name)
        assert (scored["loss_nats"], scored["adapter"]) == (losses[name], name)
    assert losses["one"] != losses["two"] != call("eval", "demo")["loss_nats"]


def test_a_folder_is_merged_into_the_whole_base(
    several: None, call: Callable[..., Any], tmp_path: Path
) -> None:
    """One in `RUN/adapters` has a name; what is exported of it computes the same again."""
    right = call("eval", "one")["loss_nats"]
    assert call("eval", "two", "--adapter", "first")["loss_nats"] == pytest.approx(right, rel=1e-5)
    words = ("export", "two", "--to", "hf", "--adapter", "first")
    merged = call(*words, "--output", str(tmp_path / "merged"))
    assert Path(merged["folder"], "model.safetensors").is_file()
    assert call("export", "demo", "--to", "peft", "--adapter", "one")["folder"].endswith("peft-one")
    stored = call("export", "two", "--to", "hf", "--output", str(tmp_path / "two"))["storage"]
    assert 0 < stored["stored"] < 0.02 and stored["requantized"] > 0 < stored["learned"]
    none = call("sample", "two", "--adapter", "third", code=2)
    assert "--adapter first" in none["remedy"]


def test_a_file_says_of_which_run_it_is(
    several: None, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the run that trained the adapter, and none where the adapter came as a folder."""
    told: list[Any] = []

    def written(build: Any, to: str, output: Path, **how: Any) -> Path:
        told.append((how["name"], how["origin"] and how["origin"].run))
        assert not how["origin"] or (how["origin"].step, len(how["origin"].seal)) == (3, 64)
        return output

    monkeypatch.setattr("headrace.export.run.export_run", written)
    call("export", "two", "--to", "gguf")
    made = call("export", "two", "--to", "gguf", "--adapter", "one")
    call("export", "two", "--to", "gguf", "--adapter", "first")
    assert told == [("two", "two"), ("two-one", "one"), ("two-first", None)]
    assert made["file"].endswith("gguf-one/two-one-F16.gguf")
