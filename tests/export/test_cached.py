"""A decoder with a cache computes what the decoder computes, in both forms that runtimes have."""

from typing import Any

import pytest
import torch
from test_gguf import MODELS
from tiny_gguf import model

from headrace.compress.codes import quantize_nearest
from headrace.compress.spec import PRESETS, NumberFormat
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.export.cached import CachedDecoder, StaticDecoder, attending_by, decoded
from headrace.export.edge import FORMATS, spec_of
from headrace.export.onnx_file import BlockMatrix, block_of
from headrace.model.mask import Rows

IDS = torch.randint(300, (21,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_cache_gives_the_logits_of_whole_rows(name: str) -> None:
    keys: dict[str, Any] = MODELS[name][0]
    whole = model(keys)
    rows = Rows(torch.arange(len(IDS))[None])
    expected = whole.logits(torch.tensor([IDS]), rows)[0, :, :300]
    step = CachedDecoder(model(keys), 300)
    torch.testing.assert_close(decoded(step, IDS), expected, rtol=0, atol=5e-5)
    # Two rows, and a prompt behind another one.
    both = torch.tensor([IDS, IDS[::-1]])
    _, *past = step(both[:, :8], *step.empty(2))
    behind, *past = step(both[:, 8:], *past)
    torch.testing.assert_close(behind[0], expected[8:], rtol=0, atol=5e-5)
    assert {one.size(2) for one in past} == {len(IDS)}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@torch.no_grad()
def test_buffers_of_a_fixed_size_give_the_same(name: str) -> None:
    keys: dict[str, Any] = MODELS[name][0]
    expected = decoded(CachedDecoder(model(keys), 300), IDS)
    static = StaticDecoder(CachedDecoder(model(keys), 300), 32)
    static(torch.tensor([IDS[::-1]]), torch.tensor([0]))  # what another text left behind
    first = static(torch.tensor([IDS[:9]]), torch.tensor([0]))
    rest = [static(torch.tensor([[i]]), torch.tensor([n])) for n, i in enumerate(IDS[9:], 9)]
    got = torch.cat([first, *rest])
    torch.testing.assert_close(got, expected[8:], rtol=0, atol=5e-5)


def test_rotations_that_depend_on_the_length_are_refused() -> None:
    ours = model({"rope_scaling": {"kind": "dynamic"}})
    with pytest.raises(UnsupportedError, match="turns all keys anew") as refused:
        attending_by(ours, CachedDecoder(model({}), 300).attend)
    assert refused.value.remedy.text.startswith("--to hf")


@pytest.mark.parametrize(
    ("columns", "groups", "block"),
    [(64, 1, 64), (96, 1, 32), (256, 1, 256), (100, 1, 128), (768, 24, 32), (144, 3, 16)],
)
def test_blocks_hold_whole_groups(columns: int, groups: int, block: int) -> None:
    assert block_of(columns, groups) == block
    kind = NumberFormat(dtype="int8", group=0 if groups == 1 else columns // groups)
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(1))
    one = quantize_nearest(weight, kind)
    held = BlockMatrix(one, "int8")
    whole = (held.codes.float() - held.zero) * held.scales.unsqueeze(-1)
    assert torch.equal(whole.flatten(1)[:, :columns], one.dequantize())


def test_a_format_stores_what_the_run_was_trained_for_or_what_is_asked() -> None:
    own = PRESETS["8da4w"].with_group(64)
    assert spec_of("executorch", None, own) is own
    assert spec_of("executorch", "8da4w", own) is own
    assert spec_of("onnx", None, own).name == "fp32"
    assert spec_of("onnx", "int8", None) is PRESETS["int8"]
    with pytest.raises(ConfigError, match="which are fp32, int8, int4"):
        spec_of("onnx", "8da4w", None)
    assert {preset for one in FORMATS.values() for preset in one.presets} <= {"fp32", *PRESETS}
