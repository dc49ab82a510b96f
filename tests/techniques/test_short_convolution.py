"""The gated convolution is a mixer: by hand, documents, slices of features, sampling, its start."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.inference.sample import generate
from headrace.kernels.launches import since
from headrace.model.attention import KVCache, SelfAttention, Shared
from headrace.model.convolution import LAUNCH, CausalConvolution, libraries
from headrace.model.mask import Rows
from headrace.plan.technique import Unsupported
from headrace.techniques.attention.short_convolution import GatedConvolution, ShortConvolution
from headrace.train.train import step

ON = "techniques.short_convolution.between=1"
B, T, D, K = 2, 11, 24, 4
Make = Callable[..., Build]


def make(*, documents: bool = False, seed: int = 0) -> GatedConvolution:
    torch.manual_seed(seed)
    config = ModelConfig(dim=D, heads=4, kv_heads=2, vocab=64)
    mixer = GatedConvolution(config, 0, K, documents)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mixer


def shared_of(starts: list[set[int]] | None = None) -> Shared:
    """Positions that restart at `starts`, row by row, as the loader makes them."""
    place = torch.arange(T)
    rows = [
        torch.stack([place[t] - max(s for s in row if s <= t) for t in range(T)])
        for row in starts or [{0}]
    ]
    return Shared(torch.stack(rows), None, None)


def by_hand(mixer: GatedConvolution, x_TD: Tensor, starts: set[int]) -> Tensor:
    """One row, token by token: each keeps what the filter may still read of its document."""
    rows, held = [], []
    for t in range(T):
        b, c, x = mixer.bcx(x_TD[t]).view(mixer.units, 3, mixer.width).unbind(1)
        held = [*([] if t in starts else held), (b * x).flatten()][-K:]
        newest = mixer.conv.weight[:, 0].t()[-len(held) :]
        y = sum(tap * u for tap, u in zip(newest, held, strict=True))
        rows.append(mixer.out(c.flatten() * y))
    return torch.stack(rows)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_equals_the_loop_by_hand(packed: bool) -> None:
    mixer = make(documents=packed)
    x = torch.randn(B, T, D, requires_grad=True)
    starts = [{0, 3, 4, 6}, {0, 10}] if packed else [{0}, {0}]
    before = since({}, LAUNCH)
    found = mixer(x, shared_of(starts if packed else None))
    right = torch.stack([by_hand(mixer, x[b], starts[b]) for b in range(B)])
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert bool(libraries(before)) is not packed
    weigh = torch.randn(B, T, D)
    both = [
        torch.autograd.grad((y * weigh).sum(), [x, *mixer.parameters()]) for y in (found, right)
    ]
    for a, b in zip(*both, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


class Backward(TorchDispatchMode):
    """How many gradients the operation gives at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.headrace.causal_convolution_backward.default:
            self.given.append(len(found))
        return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("asked", [(True, True), (True, False), (False, True)], ids=str)
def test_frozen_filters_cost_no_gradient(asked: tuple[bool, bool], compiled: bool) -> None:
    """What an adapter leaves frozen has none, and the dearer of both is not computed for it."""
    torch.manual_seed(0)
    conv, x = CausalConvolution(D, K).double(), torch.randn(B, T, D, dtype=torch.float64)
    x.requires_grad_(asked[0])
    conv.weight.requires_grad_(asked[1])
    learns = [one for one, wanted in zip((x, conv.weight), asked, strict=True) if wanted]
    right = F.conv1d(x.mT, conv.weight, groups=D).mT
    if compiled:
        torch.compiler.reset()
    run = torch.compile(conv, backend="aot_eager", fullgraph=True) if compiled else conv
    found = run(x)
    with Backward() as seen:
        slopes = torch.autograd.grad(found.square().sum(), learns)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(slopes, torch.autograd.grad(right.square().sum(), learns))
    assert seen.given == [sum(asked)]


@pytest.mark.parametrize("own", [(0, 3), (3, 4), (4, 6), (6, T)], ids=str)
def test_a_document_does_not_feel_its_neighbours(own: tuple[int, int]) -> None:
    """They do not move at all, neither in its results nor in any gradient."""
    mixer, shared = make(documents=True), shared_of([{0, 3, 4, 6}])
    x, part = torch.randn(1, T, D), slice(*own)
    seen = []
    for change in (0.0, 7.0):
        given = x + change
        given[:, part] = x[:, part]
        given.requires_grad_()
        y = mixer(given, shared)[:, part]
        slopes = torch.autograd.grad(y.square().sum(), [given, *mixer.parameters()])
        outside = slopes[0].clone()
        outside[:, part] = 0
        assert not outside.any(), "a gradient reached another document"
        seen.append([y, slopes[0][:, part], *slopes[1:]])
    assert all(a.equal(b) for a, b in zip(*seen, strict=True))


def test_slices_of_the_features_add_up() -> None:
    """As tensor parallelism cuts it: columns and rows in groups."""
    whole, x = make(), torch.randn(B, T, D)
    parts = []
    for rank in range(whole.units):
        part = make()
        for names, dim in ((part.columns, 0), (part.rows, 1)):
            for name in names:
                cut = whole.get_submodule(name).weight.chunk(whole.units, dim)[rank]  # type: ignore[operator, union-attr]
                part.get_submodule(name).weight = torch.nn.Parameter(cut.clone())
        parts.append(part(x, shared_of()))
    torch.testing.assert_close(sum(parts), whole(x, shared_of()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt", [1, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "documents"])
def test_sampling_keeps_what_filters_still_read(make_tiny: Make, prompt: int, packed: bool) -> None:
    """Each token is the likeliest of a forward pass over all that stands before it."""
    more = ["techniques.document_packing={}"] * packed
    build = make_tiny(ON, "techniques.short_convolution.taps=4", *more)
    ids = torch.arange(2 * prompt).view(2, prompt)
    found = generate(build.model, ids, new_tokens=6, temperature=0)
    for end in range(prompt, prompt + 6):
        logits = build.model.logits(found[:, :end], Rows(torch.arange(end)[None]))
        assert logits[:, -1].argmax(-1).equal(found[:, end])


def test_a_convolution_has_no_keys_to_keep(make_tiny: Make) -> None:
    model = make_tiny(ON, "model.layers=4").model
    cache = KVCache(model.config, 1, 5, torch.empty(0))
    with torch.no_grad():
        model.hidden(torch.arange(5)[None], Rows(torch.arange(5)[None]), cache)
    assert set(cache.keys) == set(cache.values) == {1, 3} and set(cache.states) == {0, 2}


def test_every_few_layers_stay_attention(make_tiny: Make) -> None:
    build = make_tiny("techniques.short_convolution={}", "model.layers=6")
    kinds = [type(block.mixer) for block in build.model.blocks.values()]
    assert kinds == [GatedConvolution, GatedConvolution, SelfAttention] * 2
    first = build.model.get_parameter("blocks.0.mixer.conv.weight")
    assert first.abs().max() <= 3**-0.5 and 0.8 < first.std() / (1 / 3) < 1.2
    assert not ShortConvolution().active(build).active
    step(build, build.loader.step(0).micros, 0)
    found = ShortConvolution().active(build)
    assert found.active and found.numbers["launched"] == 4
    assert not ShortConvolution(taps=4).active(build).active


def test_fp32_stays_fp32(make_tiny: Make) -> None:
    build, before = make_tiny(ON), torch.backends.cudnn.allow_tf32
    with build.runtime[0]():
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 is before


def test_refuses_what_it_cannot_be(tiny_plan: Callable[..., Any], make_tiny: Make) -> None:
    plan = tiny_plan("model.layers=4")
    for key, change, why in (
        ("mesh", {"context": 2}, "another rank"),
        ("model", {"pretrained": "there"}, "attention's"),
        ("model", {"bias": True}, "no biases"),
        ("model", {"layers": 2}, "no layer of 2"),
    ):
        asked = plan.model_copy(update={key: getattr(plan, key).model_copy(update=change)})
        answer = ShortConvolution().supports(make_context(asked, torch.device("cpu")))
        assert isinstance(answer, Unsupported) and why in answer.reason and answer.remedy.text
    for more, why in (
        ("sliding_window={window=4,between=1}", "leaves without the window"),
        ('lora.targets=["mixer.bcx"]', "some layers have"),
        ('qlora.targets=["mlp.down", "mixer.qkv"]', "some layers have"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            make_tiny(ON, f"techniques.{more}", "model.layers=4")
    make_tiny(ON, 'techniques.lora.targets=["mixer.out"]')
    for other in ("linear_attention", "mup"):
        with pytest.raises(ConfigError, match=rf"short_convolution|{other}"):
            make_tiny(ON, f"techniques.{other}={{}}")
