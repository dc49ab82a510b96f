"""What is asked for so that refusals are made: of what changes learning, and of pairs of ranks."""

from places import Asked

ENDLESS = ("goal.minutes=1", "device=cpu", "model.vocab=512", "schedule.kind=constant")
"""A plan that does not say at which step it ends."""
PRUNING = "techniques/precision/weight_pruning:WeightPruning"
KNOB = "techniques.weight_pruning"
PAIRED = ("data.tokenizer=x", "data.chat.kind=preference")
LEARNING: dict[str, Asked] = {
    "techniques/attention/flash_attention_3:FlashAttention3.supports#1": Asked(
        ("mesh.context=2", "techniques.flash_attention_3.source=kernels"),
        ("context_parallel", "flash_attention_3"),
        "H200",
    ),
    "techniques/precision/quantization_aware_training:QuantizationAwareTraining.supports#3": Asked(
        ("techniques.quantization_aware_training.start=0.5",),
        ("quantization_aware_training",),
        base=ENDLESS,
    ),
    f"{PRUNING}.supports#1": Asked(
        (f"{KNOB}.pattern=unstructured", f"{KNOB}.end=0.5"), ("weight_pruning",), base=ENDLESS
    ),
    f"{PRUNING}.supports#2": Asked(
        (f"{KNOB}.metric=wanda", "mesh.tensor=2"), ("weight_pruning", "tensor_parallel")
    ),
    f"{PRUNING}.supports#3": Asked(("model.ffn=30",), ("weight_pruning",)),
    f"{PRUNING}._refuse_knobs#1": Asked((f"{KNOB}.share=0.4",), ("weight_pruning",)),
    f"{PRUNING}._refuse_knobs#2": Asked((f"{KNOB}.end=0.4",), ("weight_pruning",)),
    f"{PRUNING}._refuse_knobs#3": Asked(
        (f"{KNOB}.pattern=unstructured", f"{KNOB}.end=0.2", f"{KNOB}.start=0.4"),
        ("weight_pruning",),
    ),
    "plan/until:unknown_end#1": Asked((), ("curriculum",), base=ENDLESS),
    "techniques/loss/example_loss:ExampleLoss.supports#1": Asked((), ("example_loss",)),
    "techniques/loss/example_loss:ExampleLoss.supports#2": Asked(
        ("mesh.context=2",), ("example_loss", "document_packing", "context_parallel")
    ),
    "techniques/adapt/distillation:Distillation.supports#1": Asked(
        ("techniques.distillation.top_k=8",), ("distillation",)
    ),
    "techniques/adapt/distillation:Distillation.supports#2": Asked(
        ("techniques.distillation.teacher=x", "techniques.distillation.top_k=8"),
        ("distillation", "sequence_length_schedule"),
    ),
    "techniques/adapt/preference:Preference.supports#1": Asked(
        ("data.tokenizer=x", "data.chat.kind=auto"), ("preference",)
    ),
    "techniques/adapt/preference:Preference.supports#2": Asked(
        (*PAIRED, "mesh.context=2"), ("preference", "context_parallel")
    ),
    "techniques/adapt/preference:Preference.supports#3": Asked(
        PAIRED, ("preference", "sequence_length_schedule")
    ),
    "techniques/adapt/preference:Preference.supports#4": Asked(
        PAIRED, ("preference", "label_smoothing")
    ),
    "techniques/adapt/preference:Preference.supports#5": Asked(
        PAIRED, ("preference", "neftune", "chunked_cross_entropy")
    ),
    "techniques/design/gqa:Gqa.supports#1": Asked(("model.heads=1", "model.head_dim=64"), ("gqa",)),
    "techniques/design/gqa:Gqa.supports#2": Asked(("techniques.gqa.queries_per_key=3",), ("gqa",)),
    "techniques/design/gqa:Gqa.supports#3": Asked(("model.pretrained=x",), ("gqa",)),
    "techniques/design/mixture_of_experts:MixtureOfExperts.supports#1": Asked(
        ("model.pretrained=x",), ("mixture_of_experts",)
    ),
    "techniques/design/mixture_of_experts:MixtureOfExperts.supports#2": Asked(
        ("model.bias=true",), ("mixture_of_experts",)
    ),
    "techniques/design/mixture_of_experts:MixtureOfExperts._supports_gpu#1": Asked(
        (), ("mixture_of_experts",), "V100"
    ),
    "techniques/design/mixture_of_experts:MixtureOfExperts._supports_gpu#2": Asked(
        ("model.precision=fp32",), ("mixture_of_experts",), "H200"
    ),
    "techniques/design/mixture_of_experts:MixtureOfExperts._supports_gpu#3": Asked(
        ("techniques.mixture_of_experts.expert_ffn=1",), ("mixture_of_experts",), "H200"
    ),
    "techniques/design/mup:Mup.supports#1": Asked(("model.pretrained=x",), ("mup",)),
    "techniques/design/mup:Mup.supports#2": Asked(("model.tied_embeddings=true",), ("mup",)),
    "techniques/design/mup:Mup.supports#3": Asked(("model.head_dim=6",), ("mup",)),
    "techniques/design/mup:Mup.supports#4": Asked((), ("muon", "mup")),
    "techniques/design/stochastic_depth:StochasticDepth.supports#1": Asked(
        ("model.layers=1",), ("stochastic_depth",)
    ),
    "techniques/design/stochastic_depth:StochasticDepth.supports#2": Asked(
        (), ("stochastic_depth", "torch_compile")
    ),
    "techniques/design/deep_thin:DeepThin.supports#1": Asked(
        ("model.pretrained=x",), ("deep_thin",)
    ),
    "techniques/design/deep_thin:DeepThin.supports#3": Asked(
        ("techniques.deep_thin.ratio=40", "techniques.deep_thin.base_heads=2"), ("deep_thin",)
    ),
    "techniques/design/deep_thin:DeepThin.supports#2": Asked(
        ("techniques.deep_thin.base_heads=3",), ("deep_thin",)
    ),
    "techniques/design/value_embeddings:ValueEmbeddings.supports#1": Asked(
        ("model.layers=2",), ("value_embeddings",)
    ),
    "techniques/design/value_embeddings:ValueEmbeddings.supports#2": Asked(
        (), ("value_embeddings", "short_convolution")
    ),
    "techniques/design/weight_init:WeightInit.supports#1": Asked(
        ("model.pretrained=x",), ("weight_init",)
    ),
    "techniques/design/weight_init:WeightInit.supports#2": Asked(
        ("model.tied_embeddings=true", "techniques.weight_init.zero_head=true"), ("weight_init",)
    ),
    "techniques/optim/muon:Muon.supports#1": Asked((), ("lora", "muon", "adamw")),
    "techniques/optim/muon:Muon._refuse_symmetric#1": Asked(
        ("techniques.muon.symmetric_matmuls=true",), ("muon",), "cpu"
    ),
    "techniques/optim/muon:Muon._refuse_symmetric#2": Asked(
        ("techniques.muon.symmetric_matmuls=true",), ("muon",), "H200"
    ),
    "optim/compiled:lacks_compiler#1": Asked(
        ("techniques.muon.compiled=true",), ("muon",), "bare H200"
    ),
    "optim/compiled:lacks_compiler#2": Asked(
        ("techniques.muon.compiled=true",), ("muon",), "bare cpu"
    ),
    "optim/compiled:lacks_compiler#3": Asked(("techniques.muon.compiled=true",), ("muon",), "mps"),
    "techniques/optim/muon:Muon._wrong#1": Asked(
        ("techniques.muon.momentum_warmup_steps=2", "techniques.muon.momentum=0.5"), ("muon",)
    ),
    "techniques/optim/muon:Muon._wrong#2": Asked(
        ("techniques.muon.momentum_warmup_steps=100000",), ("muon",)
    ),
    "techniques/optim/muon:Muon._wrong#3": Asked(
        ("techniques.muon.head_pairs=true", "model.heads=3", "model.dim=48"), ("muon",)
    ),
    "techniques/optim/muon:Muon._wrong#4": Asked(("techniques.muon.fraction=0.9999",), ("muon",)),
    "techniques/optim/muon:Muon._wrong#5": Asked(
        ("techniques.muon.fraction=0.5", "techniques.muon.momentum=0"), ("muon",)
    ),
    "techniques/optim/sophia:Sophia.supports#1": Asked(
        ("mesh.pipeline=2", "techniques.sophia.share=0.5"), ("sophia", "pipeline_parallel")
    ),
    "techniques/data/length_mixing:LengthMixing.supports#1": Asked((), ("length_mixing",)),
    "techniques/data/length_mixing:LengthMixing.supports#2": Asked(
        ("techniques.length_mixing.shares=[0.5,0.6]",), ("document_packing", "length_mixing")
    ),
    "techniques/data/length_mixing:LengthMixing.supports#3": Asked(
        ("techniques.length_mixing.lengths=[7,0]",), ("document_packing", "length_mixing")
    ),
    "techniques/data/length_mixing:LengthMixing.supports#4": Asked(
        ("techniques.length_mixing.shares=[0.001,0.999]",), ("document_packing", "length_mixing")
    ),
    "techniques/schedule/sequence_length_schedule:SequenceLengthSchedule.supports#1": Asked(
        (
            "data.sequence_length=2",
            "batch.tokens=64",
            "techniques.sequence_length_schedule.start=7",
        ),
        ("sequence_length_schedule",),
    ),
    "techniques/schedule/sequence_length_schedule:SequenceLengthSchedule.supports#2": Asked(
        ("techniques.sequence_length_schedule.start=3",), ("sequence_length_schedule",)
    ),
    "techniques/schedule/window_schedule:WindowSchedule.supports#1": Asked(
        (), ("window_schedule",)
    ),
    "techniques/schedule/window_schedule:WindowSchedule.supports#2": Asked(
        ("techniques.sliding_window.window=1", "techniques.window_schedule.start=1"),
        ("window_schedule", "sliding_window"),
    ),
    "techniques/schedule/window_schedule:WindowSchedule.supports#3": Asked(
        ("techniques.sliding_window.window=8", "techniques.window_schedule.start=9"),
        ("window_schedule", "sliding_window"),
    ),
    "techniques/schedule/window_schedule:WindowSchedule.supports#4": Asked(
        (
            "mesh.context=2",
            "techniques.sliding_window.window=8",
            "techniques.window_schedule.start=2",
        ),
        ("window_schedule", "sliding_window", "context_parallel"),
    ),
    "techniques/schedule/batch_ramp:BatchRamp.supports#1": Asked(
        ("batch.tokens=256",), ("batch_ramp",)
    ),
    "techniques/schedule/batch_ramp:BatchRamp.supports#2": Asked(
        ("techniques.batch_ramp.divide=64",), ("batch_ramp",)
    ),
    "assemble/scheduled:Falling.supports#1": Asked(
        ("techniques.cosine.final_fraction=1",), ("cosine",)
    ),
    "techniques/schedule/warmup:Warmup.supports#1": Asked((), ("warmup",)),
    "techniques/schedule/weight_averaging:WeightAveraging.supports#1": Asked(
        ("techniques.weight_averaging.decay=0",), ("weight_averaging",)
    ),
    "techniques/schedule/weight_decay_schedule:WeightDecaySchedule.supports#1": Asked(
        ("techniques.weight_decay_schedule.final=1",), ("weight_decay_schedule",)
    ),
    "techniques/schedule/weight_decay_schedule:WeightDecaySchedule.supports#2": Asked(
        ("optimizer.weight_decay=0",), ("weight_decay_schedule",)
    ),
    "techniques/schedule/weight_decay_schedule:WeightDecaySchedule.supports#3": Asked(
        (), ("weight_decay_schedule",), base=ENDLESS
    ),
    "techniques/stability/spike_rewind:SpikeRewind.supports#1": Asked(
        ("techniques.spike_rewind.every=60", "checkpoint.every_steps=100")
    ),
}
"""Cases of the rooms design, optim, schedule and stability."""
