"""Commands that end in an error, by the site that makes it, and how its remedy is followed."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from shell import Case

PLAN = "explain demo device=cpu"


def on_apple(patch: pytest.MonkeyPatch) -> None:
    """Let an Apple GPU be here."""
    patch.setattr("torch.backends.mps.is_available", lambda: True)


def write(name: str, text: str) -> Any:
    """Write a file into the folder of the run."""
    return lambda run: (run.parent.parent / name).write_text(text)


def nothing(run: Path) -> None:
    """What a remedy says in words is in the next command line."""


BUDGET = "plan demo --device-name H200 --budget"
PLANS = {
    "cli/predict:_check#1": Case("plan"),
    "cli/predict:_check#2": Case(f"{BUDGET} 1e11flops --sweep"),
    "cli/predict:_check#3": Case("plan demo --data 1M --device-name H200"),
    "cli/goodput:_failures#1": Case(
        "plan demo --device-name H200 mesh.data=16 --with fsdp batch.tokens=131072 --goodput"
    ),
    "cli/goodput:_failures#2": Case(
        "plan demo --device-name H200 hardware.failures_per_1000_gpu_days=0 --goodput"
    ),
    "cli/budget:plan_budget#1": Case("plan vision-demo --device-name H200 --budget 1gpu-hours"),
    "cli/budget:_write#1": Case(f"{BUDGET} 1e11flops --out nowhere/plan.toml"),
    "tuner/lr_find:find_rate#1": Case("lr-find {tiny} --steps 20 --low 2"),
    "tuner/scratch:write_measured#1": Case("lr-find {tiny} --steps 20 --out /proc/curve"),
    "tuner/mup_check:check_mup#1": Case("check mup {tiny} --widest 128 --without muon"),
    "tuner/mup_check:check_mup#1 beside": Case(
        "check mup {tiny} --widest 128 --with muon model.tied_embeddings=true "
        "model.head_init=normal"
    ),
    "tuner/mup_check:check_mup#2": Case(
        "check mup {tiny} --without muon --with mup techniques.mup.base_dim=32 --widest 100"
    ),
    "tuner/mup_check:check_mup#3": Case(
        "check mup {tiny} --without muon --with mup techniques.mup.base_dim=32 --widest 128 "
        "optimizer.lr=1e30"
    ),
    "tuner/mup_check:_check_alone#1": Case(
        "check mup {tiny} --without muon --with mup techniques.mup.base_dim=32 --widest 128 "
        "mesh.data=2"
    ),
    "tuner/scratch:write_measured#1 mup": Case(
        "check mup {tiny} --without muon --with mup techniques.mup.base_dim=32 --widest 128 "
        "--out /proc/mup"
    ),
    "predict/amounts:Budget.read#1": Case(f"{BUDGET} 1e11flips"),
    "predict/amounts:Budget.seconds#1": Case(f"{BUDGET} 0.001usd"),
    "predict/amounts:read_tokens#1": Case(f"{BUDGET} 1e11flops --data many"),
    "predict/budget:_BudgetSearch.bought#1": Case(f"{BUDGET} 1gpu-hours --with logit_soft_cap"),
    "predict/budget:_BudgetSearch.most_tokens#1": Case(f"{BUDGET} 1e11flops --data 9"),
    "predict/budget:_Offers.nothing#1": Case(
        f"{BUDGET} 1e18flops data.sequence_length=16777216 batch.tokens=16777216"
    ),
    "predict/budget:_Offers.nothing#2": Case(f"{BUDGET} 3e5flops"),
    "plan/text_template:_wrong#1": Case(f"{PLAN} data.text_template=text"),
    "plan/text_template:check_template#1": Case(
        PLAN + " 'data.text_template={{title}} {{text}}' data.text_key=body"
    ),
    "plan/mesh_config:MeshConfig._check_auto#1": Case(f"{PLAN} mesh.auto=true mesh.data=2"),
    "plan/mesh_config:MeshConfig._check_replicate#1": Case(
        f"{PLAN} mesh.data=4 mesh.replicate=3 --with fsdp"
    ),
    "plan/mesh_config:MeshConfig._check_replicate#2": Case(
        f"{PLAN} mesh.auto=true mesh.replicate=2 --with fsdp"
    ),
    "plan/mesh_config:MeshConfig._check_expert#1": Case(f"{PLAN} mesh.auto=true mesh.expert=2"),
    "plan/mesh_config:MeshConfig._check_expert#2": Case(f"{PLAN} mesh.data=4 mesh.expert=3"),
    "plan/plan:Plan._check#1": Case(f"{PLAN} batch.tokens=1000"),
    "plan/plan:Plan._check#2": Case(f"{PLAN} batch.micro_sequences=7"),
    "plan/plan:Plan._check#3": Case(f"{PLAN} 'data.weights=[1,2]'"),
    "plan/mixture:check_mixture#1": Case(f"{PLAN} 'data.mixture.weights=[1,2]'"),
    "plan/plan:Plan._check#4": Case("explain empty.toml", write("empty.toml", "")),
    "plan/plan:Plan._check#5": Case(f"{PLAN} goal.dollars=3"),
    "plan/plan:Plan._check#6": Case(
        "explain timed.toml", write("timed.toml", "[goal]\nminutes = 1\n")
    ),
    "plan/optimizer_config:OptimizerConfig.check_tied#1": Case(
        f"{PLAN} model.tied_embeddings=true model.head_init=normal optimizer.lr_factors.head=2"
    ),
    "plan/plan:Plan._check_techniques#1": Case(
        f"{PLAN} attention=measured --with varlen_attention"
    ),
    "plan/plan:Plan._check_techniques#2": Case(f"{PLAN} mesh.tensor=2"),
    "plan/plan:Plan._check_techniques#3": Case(f"{PLAN} mesh.data=4 mesh.replicate=2"),
    "plan/plan:Plan._check_techniques#4": Case(
        f"{PLAN} schedule.warmup_steps=50 schedule.steps=20"
    ),
    "plan/plan:Plan._read#2": Case(
        "explain list.toml",
        write("list.toml", "techniques = 3\n[goal]\nsteps = 2\n"),
    ),
    "plan/plan:Plan._read#3": Case(f"{PLAN} --with muon --without muon"),
    "plan/plan:Plan.with_keys#1": Case(f"{PLAN} model.kv_heads=4 --with gqa"),
    "core/overrides:write_override#1": Case(
        f"{PLAN} nonsense",
        fills={"key=value, as in ": ""},
        drops=("nonsense",),
    ),
    "core/overrides:write_override#2": Case(f"{PLAN} name.x=3"),
    "core/strict:explained#1": Case(f"{PLAN} model.dim=-3"),
    "plan/technique:Catalogue.find#1": Case(f"{PLAN} --with wsd"),
    "plan/technique:Catalogue.find#2": Case(f"{PLAN} --with soap"),
    "plan/technique:Catalogue.find#2 none": Case(f"{PLAN} --with pruning"),
    "plan/technique:Catalogue.find#3": Case(f"{PLAN} --with xxxxxxxx"),
    "plan/technique:Catalogue.find#4": Case(f"{PLAN} --with muun"),
    "plan/technique:Catalogue.find#4 both": Case(f"{PLAN} --with muon,z-loss"),
    "plan/technique:Catalogue.with_family#1": Case(f"{PLAN} model.family=llamma"),
    "plan/plan:Plan.with_keys#2": Case(f"{PLAN} --with alibi --with rope"),
    "plan/technique:check_claims#2": Case(
        f"{PLAN} --with full_checkpoint --with selective_checkpoint"
    ),
    "costs/ledger:check_free#1": Case(f"{PLAN} --with lora --with qlora"),
    "assemble/context:check_supported#2": Case(
        "explain demo device=mps mesh.data=2", fake=on_apple
    ),
    "assemble/context:_check_rest#1": Case(f"{PLAN} --with sophia --with adamw_8bit"),
    "plan/technique:check_claims#1": Case(
        "train {tiny} --with flash_attention --with varlen_attention"
    ),
    "core/model_config:ModelConfig._check#1": Case(f"{PLAN} model.heads=4 model.kv_heads=3"),
    "core/model_config:ModelConfig._check#2": Case(f"{PLAN} model.value_embeddings=9"),
    "core/model_config:ModelConfig._check#3": Case(
        f"{PLAN} model.head_init=zero model.tied_embeddings=true"
    ),
    "model/decoder:_check_values#1": Case(
        "train {tiny} model.layers=2 goal.steps=2 model.value_embeddings=1 "
        "techniques.short_convolution.between=1"
    ),
    "core/model_config:ModelConfig._check#4": Case(f"{PLAN} model.dim=66 model.heads=4"),
    "core/model_config:ModelConfig._check#5": Case(f"{PLAN} model.head_dim=5"),
    "core/files:_too_long#1": Case(f"{PLAN} seed={2**70}"),
    "core/files:_too_deep#1": Case(f"{PLAN} name=" + "[" * 2000 + "]" * 2000),
    "core/files:read_plan_text#1": Case(
        "explain 'my latin.toml'",
        lambda run: (run.parent.parent / "my latin.toml").write_bytes(b'name = "caf\xe9"\n'),
        does={"NEW.toml in its place": nothing},
        then="explain NEW.toml",
    ),
    "core/files:read_plan_text#2": Case(
        "explain 'my text.txt'",
        write("my text.txt", "Once upon"),
        fills={"headrace train demo data.sources='my text.txt'": "headrace train {tiny}"},
    ),
    "assemble/context:find_device#1": Case("explain demo device=mps"),
    "assemble/context:elsewhere#1": Case("plan demo --device-name cpu"),
    "assemble/context:_check_scaled#1": Case("train {tiny} goal.steps=1 model.precision=fp16"),
    "assemble/context:_refused#1": Case("train {tiny} goal.steps=1 --with tf32"),
    "assemble/context:check_supported#1": Case("plan demo --device-name T4 model.precision=bf16"),
    "costs/machine:Machine.assumed#1": Case("plan demo --device-name '4090 Laptop'"),
    "techniques/compile/torch_compile:TorchCompile._no_graphs#1": Case(
        f"{PLAN} --with torch_compile techniques.torch_compile.mode=reduce-overhead"
    ),
    "techniques/design/mixture_of_experts:MixtureOfExperts._check#1": Case(
        f"{PLAN} --with mixture_of_experts techniques.mixture_of_experts.top_k=64"
    ),
    "techniques/memory/selective_checkpoint:SelectiveCheckpoint._check#1": Case(
        f"{PLAN} --with selective_checkpoint techniques.selective_checkpoint.save=attention "
        "techniques.selective_checkpoint.every_matmul=2"
    ),
}
"""Errors of a plan that is read."""


def no_checkpoints(run: Path) -> None:
    """Let the run have saved nothing."""
    os.rename(run / "checkpoints", run / "kept")
    (run / "checkpoints").mkdir()


def full_folder(run: Path) -> None:
    """Something stands where an export goes."""
    Path("out").mkdir()
    Path("out", "kept").touch()


def copied(name: str) -> Any:
    """Copy the run to another name beside it."""
    return lambda run: shutil.copytree(run, run.with_name(name), symlinks=True)


def two_runs(run: Path) -> None:
    """Two runs, of which none is near to the name that is asked for."""
    shutil.copytree(run, run.with_name("pair"), symlinks=True)


def other_format(run: Path) -> None:
    """Make the checkpoint of step 6 look written by a later version."""
    index = run / "checkpoints" / "step-6" / "checkpoint.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "format": 99}))


RUNS = {
    "inference/load:resolve_run#2": Case(
        "eval nothing",
        lambda run: os.rename(run.parent, "elsewhere"),
        fills={"headrace train demo": "headrace train {tiny}"},
    ),
    "inference/load:resolve_run#3": Case(
        "eval dmeo", does={"runs/demo": nothing}, then="eval runs/demo"
    ),
    "inference/load:resolve_run#4": Case(
        "eval zzzzzz",
        two_runs,
        prose={"which is the newest": "it tells which one it took"},
    ),
    "inference/load:_inside#1": Case("eval runs/demo/checkpoints/step-3"),
    "inference/load:_inside#2": Case("eval runs/demo/plan.toml"),
    "inference/load:read_plan#2": Case(
        "eval demo", lambda run: (run / "plan.toml").write_text("[goal]\n")
    ),
    "inference/load:_checkpoint#1": Case("eval demo --checkpoint step-999"),
    "cli/verbs:Verbs._check_json#1": Case("sample demo --prompt --json", fills={"VALUE": "the"}),
    "cli/verbs:_usage#1": Case("sample demo --nothing"),
    "cli/train:train#1": Case("train runs/demo/plan.toml --checkpoint step-6"),
    "cli/runs:sample#1": Case(f"sample demo --seed {2**70}"),
    "cli/techniques:explain#1": Case("explain"),
    "cli/techniques:list_techniques#1": Case("list --families --recipes"),
    "catalogue/explain:check_explained#1": Case("explain muon --matrix"),
    "catalogue/explain:check_explained#2": Case("explain muon --graph"),
    "catalogue/explain:check_explained#3": Case("explain muon --with z_loss"),
    "catalogue/explain:nothing_to_explain#1": Case("explain demo-1", copied("demo-1")),
    "catalogue/explain:nothing_to_explain#2": Case("explain muun"),
    "cli/doctor:advice_on#1": Case("doctor runs/demo --with muon"),
    "cli/doctor:_judged_run#1": Case(
        "doctor trace", write("trace", ""), does={"runs/demo": nothing}, then="doctor runs/demo"
    ),
    "cli/doctor:_judged_run#2": Case("doctor runs/demo/metrics.jsonl"),
    "cli/doctor:_judged_run#3": Case("doctor tracefile", write("tracefile", "{}")),
    "recipes/__init__:read_recipe#1": Case("train runs/demo"),
    "recipes/__init__:read_recipe#3": Case(
        "train demmo.toml", fills={"headrace train demo": "headrace train {tiny}"}
    ),
    "train/run_folder:RunFolder.find#1": Case("train {tiny} name=never --resume"),
    "inference/sample:_check#1": Case("sample demo --top-p 0"),
    "train/session:Session.restore#1": Case(
        "train runs/demo/plan.toml --resume --checkpoint step-9"
    ),
    "train/checkpoint:Saved.__init__#1": Case(
        "eval demo --checkpoint step-6",
        other_format,
        prose={"the version of Headrace that wrote it": "it is not here"},
    ),
    "train/checkpoint:Saved.damaged#1": Case(
        "eval demo --checkpoint step-6",
        lambda run: (run / "checkpoints/step-6/rank-00000.safetensors").write_bytes(b"x"),
    ),
    "export/run:export_run#1": Case("export demo --to gguff"),
    "export/folder:_new#1": Case(
        "export demo --to hf --output out",
        full_folder,
    ),
    "cli/verbs:Verbs.resolve_command#1": Case(
        "truth --json", prose={"python benchmarks/truth.py": "it is a program of the repository"}
    ),
}
"""Errors of verbs and of the folder of a run."""
SLOW = {
    "catalogue/graphs:explain_graphs#1": Case("explain {tiny} --graph"),
    "tuner/ablation:trials_of#1": Case(
        "ablate {tiny} --without muon", fills={"TECHNIQUE": "z_loss"}
    ),
    "tuner/ablate:ablate_command#2": Case("ablate {tiny} --with z_loss --minutes -1"),
}
"""Errors whose remedy takes long."""
CASES = PLANS | RUNS | SLOW
