"""Write adapters in PEFT's format, read them back, read what PEFT wrote, and refuse others."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.data.ingest import prepare
from headrace.export.peft import export_peft
from headrace.model.lora import DoraLinear, LoraLinear
from headrace.model.mask import Rows
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train.train import step

FAMILIES: dict[str, list[str]] = {
    "llama": ["model.kv_heads=1", "model.bias=true"],
    "gpt2": [
        "model.family=gpt2",
        "model.norm=layer_norm",
        "model.activation=gelu_tanh",
        "model.position=learned",
        "model.bias=true",
    ],
}
GEMMA = [
    "model.activation=geglu",
    "model.post_norms=true",
    "model.tied_embeddings=true",
    "model.embedding_scale=4",
    "model.window=4",
    "model.window_between=1",
    "model.attention_cap=5",
]
"""What Gemma 2 has at 16 features."""
Start = Callable[..., Build]


@pytest.fixture
def start(tiny_plan: Callable[..., Plan]) -> Start:
    """Return what builds the tiny plan from words."""

    def build(*words: str) -> Build:
        plan = tiny_plan("model.layers=2", "model.init_std=0.2", *words)
        return make_build(plan, prepare(plan), World(), torch.device("cpu"))

    return build


def logits(build: Build) -> Tensor:
    ids = torch.arange(18).view(2, 9) * 2
    with torch.no_grad():
        return build.model.logits(ids, Rows(torch.arange(9)[None]))


def trained(build: Build) -> Build:
    """The build after two steps at a rate that moves its adapters far."""
    for index in range(2):
        step(build, build.loader.step(index).micros, index)
    return build


def adapters(build: Build) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in build.model.named_parameters() if ".lora_" in n}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "knobs",
    [
        "lora={rank = 3, train_also = ['embedding', 'head']}",
        "lora={rank = 3, scaling = 'root_of_rank', targets = ['mixer.qkv', 'mixer.out'], "
        "ranks = [2, 4]}",
        "dora={rank = 2, alpha = 4.0}",
    ],
    ids=["lora and tables", "lora", "dora"],
)
def test_what_is_written_is_read_back(
    start: Start, given: Callable[..., str], tmp_path: Path, family: str, knobs: str
) -> None:
    """They are trained on with the words that were trained, or are added to the weights."""
    shape = ["model.layers=2", "model.init_std=0.2", *FAMILIES[family]]
    words = [given(*shape), f"techniques.{knobs}", "optimizer.lr=0.05"]
    build = trained(start(*words))
    export_peft(build, tmp_path / "out", run=tmp_path)
    folder = f"model.adapter='{tmp_path / 'out'}'"
    again, merged = start(*words, folder), start(words[0], folder)
    assert adapters(again).keys() == adapters(build).keys() != set()
    assert all(torch.equal(adapters(again)[name], t) for name, t in adapters(build).items())
    assert not adapters(merged)
    right = logits(build)
    assert (logits(start(words[0])) - right).abs().max() > 0.01
    torch.testing.assert_close(logits(again), right)
    torch.testing.assert_close(logits(merged), right, rtol=1e-5, atol=1e-5)


def written(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> str:
    """Write adapters as PEFT does; return the key that names them."""
    folder.mkdir()
    table = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(table | fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return f"model.adapter='{folder}'"


def projection(name: str, out: int, inner: int, rank: int = 2, seed: int = 0) -> dict[str, Tensor]:
    """Both matrices of a projection's adapter by PEFT's names."""
    draw = torch.Generator().manual_seed(seed)
    prefix = f"base_model.model.model.layers.1.{name}"
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, inner, generator=draw),
        f"{prefix}.lora_B.weight": torch.randn(out, rank, generator=draw),
    }


def test_projections_with_matrices_of_their_own_become_one_linear(
    start: Start, given: Callable[..., str], tmp_path: Path
) -> None:
    """Compare q and v alone, of two ranks, with W + alpha / r B A of each by hand."""
    base = given("model.layers=2", "model.init_std=0.2", "model.kv_heads=1")
    plain = start(base)
    dim, head = plain.config.dim, plain.config.resolved_head_dim
    tensors = projection("self_attn.q_proj", dim, dim) | projection(
        "self_attn.v_proj", head, dim, rank=3, seed=1
    )
    key = written(tmp_path / "peft", tensors, rank_pattern={"v_proj": 3})
    found = start(base, key).model.get_parameter("blocks.1.mixer.qkv.weight").detach()
    weight = plain.model.get_parameter("blocks.1.mixer.qkv.weight").detach().clone()
    q, k, v = weight[:dim], weight[dim : dim + head], weight[dim + head :]  # one group of heads
    pairs = list(tensors.values())
    right = torch.cat([q + 3.0 * pairs[1] @ pairs[0], k, v + 2.0 * pairs[3] @ pairs[2]])
    torch.testing.assert_close(found, right)
    with pytest.raises(ConfigError, match="beside 1 linears, not of one rank in all 2") as told:
        start(base, key, "techniques.lora.rank=2")
    assert told.value.remedy.changes == (("-lora",),)


def test_adapters_that_do_not_fit_are_refused(
    start: Start, given: Callable[..., str], tmp_path: Path
) -> None:
    shape = ["model.layers=2", "model.init_std=0.2", "model.kv_heads=1"]
    base = given(*shape)
    dim = start(base).config.dim
    build = trained(start(base, "techniques.lora={rank = 2, targets = ['mixer.out']}"))
    export_peft(build, tmp_path / "several" / "one", run=tmp_path)
    one = f"model.adapter='{tmp_path / 'several' / 'one'}'"

    def refused(kind: type[Exception], *words: str, told: str) -> Any:
        with pytest.raises(kind, match=told) as caught:
            start(base, *words)
        return caught.value

    several = refused(
        ConfigError, f"model.adapter='{tmp_path / 'several'}'", told="holds several adapters: one"
    )
    start(base, several.remedy.changes[0][0])
    other = refused(ConfigError, one, "techniques.lora.rank=4", told="mixer.out .rank 2.*mlp.down")
    start(base, one, "techniques.lora.rank=4", *other.remedy.changes[0])
    refused(ConfigError, one, "techniques.dora.rank=2", told="has not learned lengths")
    wide = written(tmp_path / "wide", projection("self_attn.o_proj", dim, dim + 1))
    refused(ConfigError, wide, told=in_order("another base, 'org/base'", f"[2, {dim + 1}]"))
    deep = written(tmp_path / "deep", projection("moe.gate", dim, dim))
    refused(ConfigError, deep, told="another base.*layers.1.moe.gate")
    bad = projection("self_attn.o_proj", dim, dim)
    next(iter(bad.values()))[0, 0] = torch.nan
    refused(ConfigError, written(tmp_path / "nan", bad), told="lora_A.weight.*1 numbers of")
    fine = projection("self_attn.o_proj", dim, dim)
    lone = dict([next(iter(fine.items()))])
    refused(ConfigError, written(tmp_path / "lone", lone), told="without the other")
    for name, value in {"peft_type": "IA3", "bias": "all", "init_lora_weights": "pissa"}.items():
        key = written(tmp_path / name, fine, **{name: value})
        refused(UnsupportedError, key, told=f"{name} = '{value}'")
    moved = {f"{n}.embed": t for n, t in fine.items()}
    refused(UnsupportedError, written(tmp_path / "moved", moved), told="is no lora_A")
    weights = load_file(Path(base.split("'")[1]) / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, Path(base.split("'")[1]) / "model.safetensors", metadata={"format": "pt"})
    refused(ConfigError, one, told="another base, .*: it was trained beside weights of sha256")
    with pytest.raises(ConfigError, match="trained no adapters"):
        export_peft(start(), tmp_path / "none", run=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "gemma"])
@pytest.mark.parametrize(
    "knobs",
    ["lora={rank = 3}", "dora={rank = 2}", "lora={rank = 3, train_also = ['embedding', 'head']}"],
    ids=["lora", "dora", "lora and tables"],
)
def test_peft_computes_the_same_both_ways(
    start: Start, given: Callable[..., str], tmp_path: Path, family: str, knobs: str
) -> None:
    """It opens what is written here, and what it writes, each projection apart, is read here."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    base = given("model.layers=2", "model.init_std=0.2", *FAMILIES.get(family, GEMMA))
    build = trained(start(base, f"techniques.{knobs}", "optimizer.lr=0.05"))
    export_peft(build, tmp_path / "ours", run=tmp_path)
    auto = transformers.AutoModelForCausalLM
    ids = torch.arange(18).view(2, 9) * 2

    def theirs(adapter: Path) -> Any:
        plain = auto.from_pretrained(base.split("'")[1], dtype=torch.float32)
        return peft.PeftModel.from_pretrained(plain, adapter).eval()

    with torch.no_grad():
        found = theirs(tmp_path / "ours")(ids).logits
    torch.testing.assert_close(found, logits(build), rtol=0, atol=1e-4)

    names = ["c_attn", "c_proj", "c_fc"]
    names = names if family == "gpt2" else ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    tied = family != "llama"
    saves = {}
    if "train_also" in knobs:
        both = ["wte" if family == "gpt2" else "embed_tokens", "lm_head"]
        saves = {"modules_to_save": both[: 2 - (family == "gemma")], "ensure_weight_tying": tied}
    config = peft.LoraConfig(
        **saves,
        r=3,
        lora_alpha=5,
        target_modules=names,
        rank_pattern={"v_proj": 2, "mlp.c_proj": 2},
        use_rslora=True,
        use_dora="dora" in knobs and family == "gpt2",  # else some projections have no length
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(auto.from_pretrained(base.split("'")[1]), config).eval()
    for name, parameter in model.named_parameters():
        if ("lora_" in name and "magnitude" not in name) or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    if family == "gpt2" and saves:  # whose embedding PEFT does not know as one
        wte, head = model.base_model.model.transformer.wte, model.base_model.model.lm_head
        head.modules_to_save["default"].weight.data = wte.modules_to_save["default"].weight.data
    model.save_pretrained(tmp_path / "theirs")
    ours = start(base, f"model.adapter='{tmp_path / 'theirs'}'")
    with torch.no_grad():
        right = model(ids).logits
    torch.testing.assert_close(logits(ours), right, rtol=1e-5, atol=1e-4)
    if tied and saves:  # one of both that moves apart from the other
        file = tmp_path / "theirs" / "adapter_model.safetensors"
        tensors = load_file(file)
        moved = {"base_model.model.lm_head.weight": torch.zeros(2, 2)} if family == "gemma" else {}
        tensors = {n: t for n, t in tensors.items() if "lm_head" not in n} | moved
        save_file(tensors, file)
        with pytest.raises(UnsupportedError, match="an embedding and a head that differ"):
            start(base, f"model.adapter='{tmp_path / 'theirs'}'")
    assert not any(isinstance(m, LoraLinear | DoraLinear) for m in ours.model.modules())


def test_a_run_goes_on_from_adapters_and_hands_them_on(
    tmp_path: Path, plan_file: Path, zygote: Any, given: Callable[..., str]
) -> None:
    """Train, export, go on, resume and sample without the folder, by the command line."""
    plan = [str(plan_file), given(), "techniques.qlora={rank = 2, base = 'int8'}"]
    assert zygote.run(tmp_path, "train", *plan, "name=one", "goal.steps=2").code == 0
    told = zygote.run(tmp_path, "export", "one", "--to", "peft", "--output", "out")
    assert told.code == 0 and "int8" in told.err
    words = ["train", *plan, "name=two", "model.adapter=out", "goal.steps=2"]
    ended = zygote.run(tmp_path, *words, "checkpoint.every_steps=1")
    assert ended.code == 0, ended.err
    (tmp_path / "out").rename(tmp_path / "gone")
    resumed = zygote.run(tmp_path, "train", "runs/two/plan.toml", "--resume", "goal.steps=3")
    assert resumed.code == 0, resumed.err
    assert zygote.run(tmp_path, "sample", "two", "--tokens", "3").code == 0
    none = zygote.run(tmp_path, "train", str(plan_file), "model.adapter=gone")
    assert none.code == 2 and "model.pretrained=FOLDER" in none.err
