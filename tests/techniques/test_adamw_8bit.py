"""Compare 8-bit AdamW with torchao's codes and fp32 AdamW; check its mask, shards, checkpoints."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.assemble.context import make_context
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.data.loader import Micro
from headrace.kernels.blockwise_8bit import dequantize, levels, quantize
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.memory import adamw_8bit
from headrace.techniques.memory.adamw_8bit import Adamw8bit, AdamW8bitOptimizer
from headrace.train.checkpoint import Saved
from headrace.train.state import _restore_parameter
from headrace.train.train import step

HOW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 5


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def run(p: nn.Parameter, optimizer: Any, steps: range = range(STEPS)) -> None:
    """Give every optimizer the same gradients, of very different sizes in rows."""
    for index in steps:
        whole = matrix(*p.shape, seed=index + 1) * matrix(p.size(0), 1, seed=index + 50)
        p.grad = whole
        optimizer.step()


def ours(p: nn.Parameter, **more: Any) -> AdamW8bitOptimizer:
    return AdamW8bitOptimizer({"p": p}, **{**HOW, "compiled": False, **more})


def test_its_codes_are_torchaos() -> None:
    """Where rows are whole blocks; one code in 10,000 may be the neighbour, at a tie."""
    torchao = pytest.importorskip("torchao.optim")
    from torchao.optim.quant_utils import create_dynamic_map

    for signed in (True, False):
        torch.testing.assert_close(
            torch.tensor(levels(signed)), torch.tensor(create_dynamic_map(signed))
        )
    a, b = nn.Parameter(matrix(40, 512)), nn.Parameter(matrix(40, 512))
    mine, theirs = ours(a), torchao.AdamW8bit([b], **HOW)
    with torch.compiler.set_stance("force_eager"):
        for index in range(3):
            run(a, mine, range(index, index + 1))
            run(b, theirs, range(index, index + 1))
    for key in ("exp_avg", "exp_avg_sq"):
        codes, right = mine.state[a][f"{key}_codes"], theirs.state[b][key].codes
        assert (codes.int() - right.int()).abs().max() <= 1
        assert (codes != right).float().mean() <= 1e-4
    assert (a - b).abs().max() <= 1e-3 and (a - b).abs().mean() <= 1e-6


def test_it_follows_adamw() -> None:
    a, b = nn.Parameter(matrix(30, 300)), nn.Parameter(matrix(30, 300))
    run(a, ours(a))
    run(b, torch.optim.AdamW([b], **HOW))
    moved = (b - matrix(30, 300)).norm()
    assert (a - b).norm() <= 0.05 * moved


@pytest.mark.parametrize("columns", [512, 300, 20])
def test_each_number_is_stored_as_the_nearest_level(columns: int) -> None:
    """Compare each code with a search through all levels, over its block's largest magnitude."""
    for signed in (True, False):
        table = torch.tensor(levels(signed))
        values = matrix(6, columns) if signed else matrix(6, columns).square()
        codes, scales = quantize(values, table)
        found = dequantize(codes, scales, table)
        for row, stored, largest in zip(values, found, scales, strict=True):
            parts = zip(row.split(256), stored.split(256), largest, strict=True)
            for block, back, scale in parts:
                assert scale == block.abs().max()
                best = (block[:, None] - scale * table).abs().amin(1)
                torch.testing.assert_close((back - block).abs(), best, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_tiny_blocks_have_the_codes_of_large_ones(signed: bool) -> None:
    """Squares of small gradients are about 1e-9, and a block of zeros is zeros."""
    table = torch.tensor(levels(signed))
    values = matrix(4, 300) if signed else matrix(4, 300).square()
    codes, scales = quantize(values, table)
    tiny, small = quantize(values * 2.0**-32, table)
    assert codes.equal(tiny) and small.equal(scales * 2.0**-32)
    assert not dequantize(*quantize(torch.zeros(2, 300), table), table).any()


def test_codes_are_kept_because_quantizing_twice_is_not_quantizing_once() -> None:
    """The signed map ends at -0.993: a block whose largest is negative would shrink each time."""
    table = torch.tensor(levels(True))
    codes, scales = quantize(torch.tensor([[-1.0, 0.5]]), table)
    _, again = quantize(dequantize(codes, scales, table), table)
    assert 0.99 < float(again / scales) < 1.0


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    p = nn.Parameter(matrix(30, 300))
    optimizer = ours(p)
    run(p, optimizer, range(2))
    kept = [p.detach().clone(), *(t.clone() for t in optimizer.state[p].values())]
    p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    for before, after in zip(kept, [p, *optimizer.state[p].values()], strict=True):
        assert torch.equal(before, after)
    optimizer.found_inf = torch.zeros(())
    run(p, optimizer, range(2, 3))
    q = nn.Parameter(matrix(30, 300))
    run(q, ours(q), range(3))
    assert torch.equal(p, q)


def test_slices_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = nn.Parameter(matrix(31, 300)), nn.Parameter(matrix(31, 300))
    run(a, ours(a))
    monkeypatch.setattr(adamw_8bit, "SLICE_NUMBERS", 4 * 300)
    run(b, ours(b))
    assert torch.equal(a, b)


def test_a_new_rate_compiles_nothing_new() -> None:
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    p, q = nn.Parameter(matrix(30, 300)), nn.Parameter(matrix(30, 300))
    optimizer, eager = ours(p), ours(q)
    optimizer._update = torch.compile(
        adamw_8bit.adamw_, dynamic=True, fullgraph=True, backend="aot_eager"
    )
    for index in range(4):
        for one in (optimizer, eager):
            one.param_groups[0]["lr"] = 1e-2 / (index + 1)
        run(p, optimizer, range(index, index + 1))
        run(q, eager, range(index, index + 1))
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


# --- sharded ---------------------------------------------------------------------------------


def compare_sharded() -> None:
    """On each rank: codes, scales and weights are the rows of the unsharded update's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for shape in ((7, 300), (1, 40), (64, 256)):
        whole, sharded = nn.Parameter(matrix(*shape)), nn.Parameter(matrix(*shape))
        sharded = nn.Parameter(distribute_tensor(sharded.detach(), mesh, [Shard(0)]))
        right, found = ours(whole), ours(sharded)
        for index in range(3):
            run(whole, right, range(index, index + 1))
            sharded.grad = distribute_tensor(whole.grad, mesh, [Shard(0)])
            found.step()
            scales = found.state[sharded]["exp_avg_scales"]
            found.state[sharded]["exp_avg_scales"] = scales.full_tensor()  # as a checkpoint gives
        assert torch.equal(sharded.full_tensor(), whole)
        for key, wanted in right.state[whole].items():
            value = found.state[sharded][key]
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(value, wanted), key
    dist.destroy_process_group()


def test_shards_of_rows_hold_the_same_state(zygote: Any, tmp_path: Path) -> None:
    zygote.call(2, tmp_path, Path(__file__), "compare_sharded")


# --- in a run --------------------------------------------------------------------------------


def test_large_matrices_come_here_and_the_rest_stays(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(
        "techniques.adamw_8bit.smallest=600",
        "optimizer.weight_decay=0.3",
        "optimizer.eps=1e-6",
        "optimizer.betas=[0.8, 0.9]",
    )
    taken = build.routed["adamw_8bit"]
    for name, value in {"weight_decay": 0.3, "eps": 1e-6, "betas": (0.8, 0.9)}.items():
        assert build.optimizers["adamw_8bit"].param_groups[0][name] == value
    named = dict(build.model.named_parameters())
    assert taken.keys() == {n for n, p in named.items() if p.ndim == 2 and p.numel() >= 600}
    assert {**taken, **build.routed["adamw"]}.keys() == named.keys()
    step(build, build.loader.step(0).micros, 0)
    numbers = check_active(build)["adamw_8bit"].numbers
    each = {n: 2 * (p.numel() + 4 * p.size(0)) for n, p in taken.items()}  # rows are one block
    assert numbers["state_bytes"] == sum(each.values())
    for state in build.optimizers["adamw_8bit"].state.values():  # as much as AdamW's saves nothing
        state["exp_avg_sq_codes"] = state["exp_avg_sq_codes"].double()
    assert not build.plan.techniques["adamw_8bit"].active(build).active


MATRICES = {
    "alone": [],
    "experts": ["techniques.mixture_of_experts.experts=4"],
    "gates": ["techniques.linear_attention.rule=gated_delta"],
    "filters": ["techniques.short_convolution.between=1", "techniques.gqa={}"],
    "adapters": ["techniques.lora.rank=40"],
    "adapters of gates": ["techniques.linear_attention={}", "techniques.lora.rank=32"],
}
TAKEN = [(beside, n) for beside in MATRICES for n in (1, 512, 1 << 20)]
TAKEN[TAKEN.index(("adapters", 1 << 20))] = ("adapters", 640)  # beyond all of them it is refused


@pytest.mark.parametrize(("beside", "smallest"), TAKEN)
def test_its_bytes_are_predicted(
    make_tiny: Callable[..., Build], states: Callable[[Build], Any], beside: str, smallest: int
) -> None:
    """Take the matrices that are large enough and that no other technique takes."""
    build = make_tiny(f"techniques.adamw_8bit.smallest={smallest}", *MATRICES[beside])
    held, predicted = states(build)
    assert predicted == held


@pytest.mark.parametrize(
    ("beside", "most", "works"),
    [
        (["techniques.lora.rank=2"], 128, "smallest=128"),
        (["techniques.qlora={rank = 2, base = 'int8'}", "model.dim=32"], 192, "smallest=192"),
        (["techniques.lora.rank=2", "techniques.mixture_of_experts={}"], 96, "smallest=96"),
        (["techniques.lora={rank = 2, targets = ['mixer.out']}"], 32, "smallest=32"),
        (["techniques.lora.rank=1"], 64, "smallest=16"),  # 10 bytes a number of rows of one
        (
            ["techniques.lora={rank = 1, targets = ['mlp.gate_up']}", "model.ffn=64"],
            128,
            "techniques.lora.rank=2 techniques.adamw_8bit.smallest=1",
        ),
    ],
)
def test_adapters_too_small_for_it_are_refused_with_what_works(
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Micro]],
    beside: list[str],
    most: int,
    works: str,
) -> None:
    with pytest.raises(UnsupportedError, match=f"at most {most} numbers") as told:
        make_tiny(*beside, "techniques.adamw_8bit={}")
    remedy = told.value.remedy.text.removesuffix(" (or --without adamw_8bit)")
    assert remedy.endswith(works)
    build = make_tiny(*beside, *remedy.split())
    step(build, batch(build), 0)
    found = check_active(build)["adamw_8bit"]
    assert found.active and found.numbers["bytes_per_number"] < 8


def test_adapters_are_as_large_as_the_pretrained_model(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for dim in (16, 1024):
        config = ModelConfig(dim=dim, layers=1, heads=2)
        monkeypatch.setattr(adamw_8bit, "shape_of", lambda model, c=config: c)
        plan = tiny_plan("model={pretrained = 'there'}", "techniques.lora.rank=8")
        answers.append(Adamw8bit().supports(make_context(plan, torch.device("cpu"))))
    assert [type(answer) for answer in answers] == [Unsupported, Supported]


SPLIT = ["techniques.tensor_parallel={}", "techniques.adamw_8bit={}"]


@pytest.mark.parametrize(
    ("ranks", "model", "beside", "found", "works"),
    [
        (2, (768, 2048), [], "384 of the 768 columns of mixer.out", 1),
        (8, (1024, 8192), [], "128 of the 1024 columns of mixer.out", 4),
        (8, (4096, 11008), [], "1376 of the 11008 columns of mlp.down", 1),
        (4, (1024, 1536), [], "384 of the 1536 columns of mlp.down", 2),
        (2, (256, 1024), [], "128 of the 256 columns of mixer.out", 1),
        (4, (1024, 4096), [], "", 4),
        (2, (768, 2048), ["techniques.adamw_8bit.smallest=8388608"], "", 2),  # takes none of them
        (2, (768, 2048), ["techniques.muon={}"], "", 2),  # which takes them first
        (2, (512, 768), ["techniques.chunked_mlp={}"], "384 of the 768 columns of mlp.down", 1),
        (2, (512, 768), ["techniques.mixture_of_experts={}"], "", 2),  # seen when it is built
    ],
)
def test_columns_that_ranks_cannot_share_in_whole_blocks_are_refused(
    tiny_plan: Callable[..., Plan],
    ranks: int,
    model: tuple[int, int],
    beside: list[str],
    found: str,
    works: int,
) -> None:
    """With the next number of ranks that can: there nothing is refused."""
    dim, ffn = model
    sizes = [f"model.dim={dim}", "model.heads=16", f"model.ffn={ffn}", "model.kv_heads=16"]

    def ask(ranks: int) -> Any:
        plan = tiny_plan(*SPLIT, *sizes, *beside, f"mesh.tensor={ranks}")
        return plan.techniques["adamw_8bit"].supports(make_context(plan, torch.device("cpu")))

    answer = ask(ranks)
    assert isinstance(answer, Unsupported if found else Supported)
    if found:
        assert f"mesh.tensor = {ranks} gives each rank {found}" in answer.reason
        whole = " --without tensor_parallel" * (works == 1)
        assert "blocks are of 256" in answer.reason
        assert answer.remedy.text == f"mesh.tensor={works}{whole}"
    assert works == 1 or isinstance(ask(works), Supported)


@pytest.mark.parametrize(("ffn", "refused"), [(512, False), (768, True)])
@pytest.mark.parametrize("beside", [[], ["techniques.mixture_of_experts={experts = 2, top_k = 1}"]])
def test_what_is_built_is_refused_likewise(
    make_tiny: Callable[..., Build], beside: list[str], ffn: int, refused: bool
) -> None:
    """It depends on how the ranks hold a matrix, whoever made it."""
    build = make_tiny("techniques.adamw_8bit.smallest=256", f"model.ffn={ffn}", *beside)
    end = ".down" if beside else ".down.weight"
    named = {n: p for n, p in build.routed["adamw_8bit"].items() if n.endswith(end)}
    for name, p in named.items():
        build.layouts[name].split["tensor"] = p.ndim - 1
    build.world = World(ranks=2, sizes={"tensor": 2})
    (route,) = build.routes
    columns = {p.size(-1) for p in named.values()}
    assert columns == {ffn}
    if not refused:
        assert route.make(named).param_groups
        return
    with pytest.raises(ConfigError, match=rf"\b384 .*\b768 .*blocks.*{end}"):
        route.make(named)


def test_a_route_with_a_wish_comes_first(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny("techniques.adamw_8bit.smallest=256", "techniques.muon={}")
    assert all(n.startswith("blocks.") for n in build.routed["muon"])
    assert set(build.routed["adamw_8bit"]) == {"embed.weight", "head.weight"}


def test_a_checkpoint_holds_the_codes(train: Callable[..., Path]) -> None:
    folder = train("techniques.adamw_8bit.smallest=256")
    saved = Saved(folder / "checkpoints" / "latest")
    prefix = "optimizer/embed.weight/"
    kinds = {n.removeprefix(prefix): saved.shape_of(n)[1] for n in saved.names_under(prefix)}
    assert kinds["exp_avg_codes"] == kinds["exp_avg_sq_codes"] == torch.uint8
    assert kinds.keys() == {
        "step",
        *(f"{m}_{part}" for m in ("exp_avg", "exp_avg_sq") for part in ("codes", "scales")),
    }


def test_a_rank_restores_its_own_scales_and_keeps_no_others(
    make_tiny: Callable[..., Build],
) -> None:
    build, name = make_tiny("techniques.adamw_8bit.smallest=256"), "embed.weight"
    rows = build.layouts[name].shape[0]
    build.layouts[name].split["tensor"] = 0
    build.world = World(ranks=2, sizes={"tensor": 2})
    saved: Any = SimpleNamespace(
        names_under=lambda prefix: [f"{prefix}exp_avg_scales"],
        shape_of=lambda full: ((rows, 1), torch.float32),
        fill_=lambda *given: None,
    )
    optimizer, p = build.optimizers["adamw_8bit"], build.model.get_parameter(name)
    _restore_parameter(build, optimizer, name, p, saved)
    scales = optimizer.state[p]["exp_avg_scales"]
    assert scales.untyped_storage().nbytes() == scales.nbytes == 4 * rows // 2


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("name", ["adamw_8bit", "muon"])
def test_a_compiled_update_is_no_eager_step(
    make_tiny: Callable[..., Build], name: str, compiled: str
) -> None:
    """Memory is read under dispatch modes in an eager step, and no compiler takes those."""
    assert make_tiny(f"techniques.{name}.compiled={compiled}").is_eager is (compiled == "false")
