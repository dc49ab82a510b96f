"""What is asked for, and where, so that each refusal of a technique is made."""

from places import Asked
from refusal_cases_learning import LEARNING

QAT = "techniques/precision/quantization_aware_training:QuantizationAwareTraining"
ASYNCHRONOUS = "techniques.tensor_parallel.asynchronous=true"
IMAGES = (
    *("goal.steps=4", "device=cpu", "schedule.steps=40", "vision.classes=10"),
    *("data.sequence_length=1", "batch.tokens=64"),
)
"""A plan for images."""
CASES: dict[str, Asked] = {
    **LEARNING,
    "model/backend_needs:_lacks_mask#1": Asked(("model.window=4",), ("flash_attention",), "H200"),
    "techniques/attention/logit_soft_cap:LogitSoftCap.supports#1": Asked(
        ("model.attention_cap=50",), ("logit_soft_cap",)
    ),
    "techniques/attention/sliding_window:SlidingWindow.supports#1": Asked(
        ("model.window=4",), ("sliding_window",)
    ),
    "techniques/attention/yarn:Yarn.supports#2": Asked(
        ("model.rope_scaling.kind=linear", "model.rope_scaling.factor=8"), ("yarn",)
    ),
    "model/backend_needs:_lacks_gpu#1": Asked((), ("cudnn_attention",)),
    "model/backend_needs:_lacks_gpu#3": Asked((), ("cudnn_attention",), "V100"),
    "model/backend_needs:_lacks_numbers#2": Asked(
        ("model.precision=fp32",), ("cudnn_attention",), "H200"
    ),
    "model/backend_needs:_lacks_numbers#3": Asked(
        ("model.head_dim=300",), ("flash_attention",), "H200"
    ),
    "model/backend_needs:_lacks_mask#2": Asked((), ("alibi", "flash_attention"), "H200"),
    "techniques/adapt/qlora:Qlora._refuse_cut#1": Asked(
        ("mesh.tensor=2", "model.ffn=192"), ("qlora", "tensor_parallel")
    ),
    "techniques/adapt/qlora:Qlora._refuse_whole#1": Asked(
        ("model.layers=2", "techniques.qlora.whole_blocks=2"), ("qlora",)
    ),
    "techniques/adapt/qlora:Qlora.supports#1": Asked(
        ("model.dim=8", "model.heads=2", "model.ffn=8"), ("qlora",)
    ),
    "techniques/attention/alibi:Alibi.supports#1": Asked(("model.pretrained=x",), ("alibi",)),
    "techniques/attention/alibi:Alibi.supports#2": Asked(
        ("mesh.context=2",), ("alibi", "context_parallel")
    ),
    "model/backend_needs:_lacks_gpu#2": Asked((), ("flash_attention_3",), "V100"),
    "model/backend_needs:_lacks_numbers#1": Asked(
        (
            "techniques.flash_attention_3.version=FA4",
            "techniques.flash_attention_3.source=torch",
            "model.head_dim=48",
        ),
        ("flash_attention_3",),
        "H200",
    ),
    "techniques/attention/flash_attention_3:FlashAttention3._is_here#1": Asked(
        (
            "techniques.flash_attention_3.version=FA4",
            "techniques.flash_attention_3.source=kernels",
            "model.head_dim=64",
        ),
        ("flash_attention_3",),
        "H200",
    ),
    "techniques/attention/flash_attention_3:FlashAttention3._is_here#2": Asked(
        ("techniques.flash_attention_3.source=kernels",), ("flash_attention_3",), "H200"
    ),
    "techniques/attention/flash_attention_3:FlashAttention3._is_here#4": Asked(
        (), ("flash_attention_3",), "H200"
    ),
    "model/backend_needs:_lacks_gpu#4": Asked((), ("flex_attention",), "bare H200"),
    "techniques/attention/linear_attention:LinearAttention.supports#1": Asked(
        ("model.pretrained=x",), ("linear_attention",)
    ),
    "techniques/attention/linear_attention:LinearAttention._supports_fla#2": Asked(
        ("techniques.linear_attention.kernels=fla",), ("linear_attention",)
    ),
    "techniques/attention/linear_attention:LinearAttention._supports_fla#3": Asked(
        ("techniques.linear_attention.kernels=fla",), ("linear_attention",), "bare H200"
    ),
    "techniques/attention/linear_attention:LinearAttention._supports_fla#6": Asked(
        ("techniques.linear_attention.kernels=fla",), ("linear_attention",), "H200"
    ),
    "techniques/attention/logit_soft_cap:LogitSoftCap.supports#2": Asked(
        ("mesh.context=2",), ("logit_soft_cap", "context_parallel")
    ),
    "techniques/attention/prefix_lm:PrefixLm.supports#1": Asked(
        ("techniques.prefix_lm.tokens=256",), ("prefix_lm",)
    ),
    "techniques/attention/prefix_lm:PrefixLm.supports#2": Asked(
        ("mesh.context=2", "techniques.prefix_lm.tokens=8"), ("prefix_lm", "context_parallel")
    ),
    "techniques/attention/short_convolution:ShortConvolution.supports#1": Asked(
        ("model.pretrained=x",), ("short_convolution",)
    ),
    "techniques/attention/short_convolution:ShortConvolution.supports#2": Asked(
        ("model.bias=true",), ("short_convolution",)
    ),
    "techniques/attention/short_convolution:ShortConvolution.supports#3": Asked(
        ("mesh.context=2",), ("short_convolution", "context_parallel")
    ),
    "techniques/attention/short_convolution:ShortConvolution.supports#4": Asked(
        ("model.layers=1",), ("short_convolution",)
    ),
    "techniques/attention/short_convolution:ShortConvolution._beside#2": Asked(
        ('techniques.lora.targets=["mixer.qkv"]',), ("short_convolution", "lora")
    ),
    "techniques/attention/sliding_window:SlidingWindow.supports#2": Asked((), ("sliding_window",)),
    "techniques/attention/sparse_attention:SparseAttention.supports#1": Asked(
        ("mesh.context=2",), ("sparse_attention", "context_parallel")
    ),
    "techniques/attention/sparse_attention:SparseAttention.supports#2": Asked(
        (), ("sparse_attention",)
    ),
    "techniques/attention/yarn:Yarn.supports#1": Asked(("model.position=none",), ("yarn",)),
    "techniques/attention/yarn:Yarn.supports#3": Asked(
        ("techniques.yarn.beta_slow=1000000.0",), ("yarn",)
    ),
    "techniques/attention/yarn:Yarn.supports#5": Asked(
        ("techniques.yarn.kind=dynamic", "mesh.context=2"), ("yarn", "context_parallel")
    ),
    "techniques/attention/yarn:Yarn.supports#6": Asked(
        ("model.rope_theta=1", "model.head_dim=4"), ("yarn",)
    ),
    "techniques/attention/yarn:Yarn._within#1": Asked(
        ("techniques.yarn.factor=1000000.0",), ("yarn",)
    ),
    "techniques/attention/yarn:Yarn._within#2": Asked(
        ("techniques.yarn.kind=dynamic", "techniques.yarn.original_length=1000"), ("yarn",)
    ),
    "techniques/attention/yarn:Yarn._within#3": Asked(("model.head_dim=2",), ("yarn",)),
    "techniques/compile/compile_cache:CompileCache.supports#1": Asked((), ("compile_cache",)),
    "techniques/compile/compile_cache:CompileCache.supports#2": Asked(
        ("techniques.torch_compile.backend=eager",), ("compile_cache", "torch_compile")
    ),
    "techniques/compile/compile_cache:CompileCache.supports#4": Asked(
        ("techniques.compile_cache.directory=runs/cache",), ("compile_cache", "torch_compile")
    ),
    "techniques/compile/compile_cache:CompileCache.supports#5": Asked(
        ("techniques.compile_cache.directory=/usr",), ("torch_compile", "compile_cache")
    ),
    "techniques/compile/compile_cache:CompileCache.supports#6": Asked(
        ("techniques.compile_cache.directory=/etc/passwd/cache",),
        ("torch_compile", "compile_cache"),
    ),
    "techniques/compile/cuda_graphs:CudaGraphs.supports#1": Asked((), ("cuda_graphs",)),
    "techniques/compile/cuda_graphs:CudaGraphs.supports#2": Asked((), ("cuda_graphs",), "H200"),
    "techniques/compile/cuda_graphs:CudaGraphs.supports#3": Asked(
        ("techniques.torch_compile.backend=eager",), ("cuda_graphs", "torch_compile"), "H200"
    ),
    "techniques/compile/cuda_graphs:CudaGraphs.supports#4": Asked(
        ("mesh.data=2",), ("cuda_graphs", "torch_compile"), "H200"
    ),
    "techniques/compile/cudnn_autotune:CudnnAutotune.supports#1": Asked((), ("cudnn_autotune",)),
    "techniques/compile/cudnn_autotune:CudnnAutotune.supports#4": Asked(
        (), ("cudnn_autotune",), "H200"
    ),
    "techniques/compile/cudnn_autotune:CudnnAutotune.supports#5": Asked(
        (), ("cudnn_autotune", "short_convolution", "document_packing"), "H200"
    ),
    "techniques/compile/shape_buckets:ShapeBuckets.supports#1": Asked((), ("shape_buckets",)),
    "techniques/compile/shape_buckets:ShapeBuckets.supports#2": Asked(
        (), ("shape_buckets", "torch_compile")
    ),
    "techniques/compile/shape_buckets:ShapeBuckets.supports#3": Asked(
        ("mesh.context=2",),
        ("shape_buckets", "torch_compile", "sequence_length_schedule", "context_parallel"),
    ),
    "techniques/compile/shape_buckets:ShapeBuckets.supports#4": Asked(
        ("techniques.shape_buckets.multiple=2", "techniques.sequence_length_schedule.start=64"),
        ("shape_buckets", "torch_compile", "sequence_length_schedule"),
    ),
    "techniques/compile/torch_compile:TorchCompile.supports#1": Asked(
        ("mesh.data=2",), ("torch_compile", "fsdp")
    ),
    "techniques/compile/torch_compile:TorchCompile.supports#2": Asked(
        (), ("torch_compile",), "bare H200"
    ),
    "techniques/compile/torch_compile:TorchCompile.supports#3": Asked(
        (), ("torch_compile",), "bare cpu"
    ),
    "techniques/compile/torch_compile:TorchCompile.supports#4": Asked(
        (), ("torch_compile",), "mps"
    ),
    "techniques/data/loader_workers:LoaderWorkers.supports#1": Asked(
        (), ("loader_workers", "sequence_length_schedule"), "H200"
    ),
    "techniques/fusion/fused_rms_norm:FusedRmsNorm.supports#1": Asked(
        ("model.norm=layer_norm",), ("fused_rms_norm",)
    ),
    "techniques/fusion/fused_rope:FusedRope.supports#1": Asked(
        ("model.position=none",), ("fused_rope",)
    ),
    "techniques/fusion/fused_swiglu:FusedSwiglu.supports#1": Asked(
        ("model.activation=gelu",), ("fused_swiglu",)
    ),
    "techniques/fusion/liger_kernels:LigerKernels.supports#1": Asked(
        ("model.norm=layer_norm",), ("liger_kernels",)
    ),
    "techniques/fusion/liger_kernels:LigerKernels.supports#2": Asked(
        ("model.activation=gelu",), ("liger_kernels",)
    ),
    "techniques/fusion/liger_kernels:LigerKernels.supports#3": Asked(
        (), ("liger_kernels",), "H200"
    ),
    "techniques/loss/chunked_cross_entropy:ChunkedCrossEntropy.supports#1": Asked(
        ("techniques.chunked_cross_entropy.fused=true",), ("chunked_cross_entropy",)
    ),
    "techniques/loss/chunked_cross_entropy:ChunkedCrossEntropy.supports#2": Asked(
        ("techniques.chunked_cross_entropy.fused=true",),
        ("chunked_cross_entropy", "distillation"),
        "H200",
    ),
    "techniques/loss/chunked_cross_entropy:ChunkedCrossEntropy.supports#3": Asked(
        ("techniques.chunked_cross_entropy.native=true",), ("chunked_cross_entropy",), "H200"
    ),
    "techniques/loss/chunked_cross_entropy:ChunkedCrossEntropy.supports#4": Asked(
        ("batch.tokens=512",), ("chunked_cross_entropy",)
    ),
    "techniques/loss/fused_cross_entropy:FusedCrossEntropy.supports#1": Asked(
        (), ("fused_cross_entropy",), "V100"
    ),
    "techniques/loss/fused_cross_entropy:FusedCrossEntropy.supports#2": Asked(
        (), ("distillation", "fused_cross_entropy"), "H200"
    ),
    "techniques/memory/activation_offload:ActivationOffload.supports#1": Asked(
        (), ("activation_offload",)
    ),
    "techniques/memory/activation_offload:ActivationOffload.supports#2": Asked(
        (), ("activation_offload", "torch_compile"), "H200"
    ),
    "techniques/memory/activation_offload:ActivationOffload.supports#3": Asked(
        ("model.layers=1",), ("activation_offload",), "H200"
    ),
    "techniques/memory/adamw_8bit:Adamw8bit.supports#1": Asked(
        ("techniques.adamw_8bit.smallest=1000000000",), ("adamw_8bit", "lora")
    ),
    "techniques/memory/adamw_8bit:_unshared#1": Asked(
        ("mesh.tensor=2",), ("adamw_8bit", "tensor_parallel")
    ),
    "techniques/memory/chunked_mlp:ChunkedMLP.supports#1": Asked((), ("chunked_mlp",)),
    "techniques/memory/dynamic_batch:DynamicBatch.supports#1": Asked(
        ("mesh.data=2",), ("dynamic_batch", "fsdp")
    ),
    "techniques/memory/dynamic_batch:DynamicBatch.supports#2": Asked((), ("dynamic_batch",), "mps"),
    "techniques/memory/expandable_segments:ExpandableSegments.supports#1": Asked(
        (), ("expandable_segments",)
    ),
    "techniques/memory/kept_memory:KeptMemory.supports#1": Asked((), ("kept_memory",), "H200"),
    "techniques/memory/memory_budget:MemoryBudget.supports#1": Asked((), ("memory_budget",)),
    "techniques/memory/memory_budget:MemoryBudget.supports#2": Asked(
        ("techniques.torch_compile.backend=eager",), ("memory_budget", "torch_compile")
    ),
    "techniques/memory/optimizer_in_backward:OptimizerInBackward.supports#1": Asked(
        (), ("optimizer_in_backward",)
    ),
    "techniques/memory/optimizer_in_backward:OptimizerInBackward.supports#2": Asked(
        ("batch.micro_sequences=1", "optimizer.clip_norm=0"), ("optimizer_in_backward",)
    ),
    "techniques/memory/optimizer_in_backward:OptimizerInBackward.supports#3": Asked(
        ("mesh.tensor=2", "optimizer.clip_norm=0"), ("optimizer_in_backward", "tensor_parallel")
    ),
    "techniques/memory/optimizer_in_backward:OptimizerInBackward.supports#4": Asked(
        ("mesh.data=2", "optimizer.clip_norm=0"), ("optimizer_in_backward",)
    ),
    "techniques/memory/optimizer_offload:OptimizerOffload.supports#1": Asked(
        (), ("optimizer_offload",)
    ),
    "techniques/memory/selective_checkpoint:SelectiveCheckpoint.supports#1": Asked(
        ("techniques.selective_checkpoint.save=attention",),
        ("selective_checkpoint", "logit_soft_cap"),
    ),
    "techniques/memory/selective_checkpoint:SelectiveCheckpoint.supports#2": Asked(
        (
            "techniques.selective_checkpoint.save=attention",
            "techniques.selective_checkpoint.wide_every=2",
        ),
        ("selective_checkpoint",),
    ),
    "techniques/parallel/cpu_threads:CpuThreads.supports#1": Asked((), ("cpu_threads",), "H200"),
    "techniques/parallel/cpu_threads:CpuThreads.supports#2": Asked(
        ("techniques.cpu_threads.threads=1000",), ("cpu_threads",)
    ),
    "assemble/row_parts:RowPartTechnique.supports#1": Asked((), ("context_parallel",)),
    "techniques/parallel/context_parallel:ContextParallel.supports#1": Asked(
        ("mesh.context=2", "model.attention_cap=2"), ("context_parallel",)
    ),
    "techniques/parallel/context_parallel:ContextParallel.supports#2": Asked(
        ("mesh.context=2",), ("context_parallel", "flex_attention"), "H200"
    ),
    "assemble/row_parts:RowPartTechnique.supports#3": Asked(
        ("mesh.context=2",), ("context_parallel", "short_convolution")
    ),
    "assemble/row_parts:RowPartTechnique.supports#4": Asked(
        (
            "mesh.context=2",
            "model.rope_scaling.kind=dynamic",
            "model.rope_scaling.factor=2",
            "model.rope_scaling.original_length=8",
        ),
        ("context_parallel",),
    ),
    "assemble/sliced:SlicingTechnique.supports#1": Asked((), ("fsdp",)),
    "assemble/sliced:SlicingTechnique.supports#2": Asked(
        ("mesh.data=4", "mesh.replicate=4"), ("fsdp",)
    ),
    "assemble/sliced:SlicingTechnique.supports#3": Asked(
        ("techniques.fsdp.gather=bf16", "mesh.data=2"), ("fsdp",)
    ),
    "assemble/sliced:SlicingTechnique._gathers_fp8#1": Asked(
        ("techniques.fsdp.gather=fp8", "mesh.data=2"), ("fsdp",)
    ),
    "assemble/sliced:SlicingTechnique._gathers_fp8#2": Asked(
        (
            "techniques.fsdp.gather=fp8",
            "mesh.data=2",
            "techniques.float8_linear.recipe=rowwise",
            "techniques.float8_linear.min_size=1",
        ),
        ("fsdp", "float8_linear"),
    ),
    "techniques/parallel/expert_parallel:ExpertParallel.supports#1": Asked(
        (), ("expert_parallel",)
    ),
    "techniques/parallel/expert_parallel:ExpertParallel.supports#2": Asked(
        (), ("expert_parallel", "mixture_of_experts")
    ),
    "techniques/parallel/expert_parallel:ExpertParallel.supports#3": Asked(
        ("mesh.data=4", "mesh.expert=4", "techniques.mixture_of_experts.experts=2"),
        ("expert_parallel", "mixture_of_experts"),
    ),
    "techniques/parallel/ulysses:Ulysses.supports#1": Asked(
        ("mesh.context=4", "model.heads=4", "model.kv_heads=2"), ("ulysses",)
    ),
    "techniques/parallel/data_parallel:DataParallel.supports#1": Asked((), ("data_parallel",)),
    "techniques/parallel/data_parallel:DataParallel.supports#2": Asked(
        ("techniques.data_parallel.reduce=bf16", "mesh.data=2"), ("data_parallel",)
    ),
    "techniques/parallel/pipeline_parallel:PipelineParallel.supports#1": Asked(
        ("techniques.pipeline_parallel.chunks=2",), ("pipeline_parallel",)
    ),
    "techniques/parallel/pipeline_parallel:PipelineParallel.supports#2": Asked(
        (), ("pipeline_parallel",)
    ),
    "techniques/parallel/pipeline_parallel:PipelineParallel.supports#3": Asked(
        ("mesh.pipeline=8",), ("pipeline_parallel",)
    ),
    "techniques/parallel/pipeline_parallel:PipelineParallel._refuse_whole#1": Asked(
        (
            "mesh.pipeline=2",
            "mesh.data=2",
            "techniques.pipeline_parallel.schedule=zbv",
            "techniques.pipeline_parallel.chunks=2",
        ),
        ("pipeline_parallel", "fsdp"),
    ),
    "techniques/parallel/pipeline_parallel:PipelineParallel.supports#4": Asked(
        ("mesh.pipeline=2", "techniques.pipeline_parallel.layers=[1,9]"), ("pipeline_parallel",)
    ),
    "techniques/parallel/pipeline_parallel:PipelineParallel.supports#5": Asked(
        (
            "mesh.pipeline=2",
            "techniques.pipeline_parallel.schedule=interleaved",
            "techniques.pipeline_parallel.chunks=2",
        ),
        ("pipeline_parallel",),
    ),
    "techniques/parallel/tensor_parallel:TensorParallel.supports#1": Asked(
        (), ("tensor_parallel",)
    ),
    "techniques/parallel/tensor_parallel:TensorParallel.supports#2": Asked(
        ("mesh.tensor=3",), ("tensor_parallel",)
    ),
    "techniques/parallel/tensor_parallel:TensorParallel._waits#1": Asked(
        (ASYNCHRONOUS, "mesh.tensor=2"), ("tensor_parallel",)
    ),
    "techniques/parallel/tensor_parallel:TensorParallel._waits#2": Asked(
        (ASYNCHRONOUS, "mesh.tensor=2"), ("tensor_parallel",), "H200"
    ),
    "techniques/parallel/tensor_parallel:TensorParallel._waits#3": Asked(
        (ASYNCHRONOUS, "mesh.tensor=2", "techniques.float8_linear.min_size=1"),
        ("tensor_parallel", "torch_compile", "float8_linear"),
        "H200",
    ),
    "techniques/parallel/tensor_parallel:TensorParallel._waits#4": Asked(
        (ASYNCHRONOUS, "mesh.tensor=2", "techniques.tensor_parallel.sequence=false"),
        ("tensor_parallel", "torch_compile"),
        "H200",
    ),
    "techniques/parallel/tensor_parallel:TensorParallel._waits#5": Asked(
        (ASYNCHRONOUS, "mesh.tensor=2", "data.sequence_length=33", "batch.tokens=264"),
        ("tensor_parallel", "torch_compile"),
        "H200",
    ),
    "techniques/precision/bf16_autocast:Bf16Autocast.supports#1": Asked(
        (), ("bf16_autocast",), "V100"
    ),
    "techniques/precision/bf16_parameters:Bf16Parameters.supports#1": Asked(
        (), ("bf16_parameters",), "V100"
    ),
    "techniques/precision/bf16_parameters:Bf16Parameters.supports#2": Asked(
        ("techniques.bf16_parameters.fused=true",), ("bf16_parameters",)
    ),
    "techniques/precision/bf16_parameters:Bf16Parameters.supports#3": Asked(
        (), ("bf16_parameters", "mup")
    ),
    "techniques/precision/bf16_parameters:Bf16Parameters.supports#4": Asked(
        ("techniques.zero.zero_stage=2", "mesh.data=2", "batch.micro_sequences=1"),
        ("bf16_parameters", "zero"),
    ),
    "techniques/precision/float8_linear:Float8Linear.supports#2": Asked(
        (), ("float8_linear",), "mps"
    ),
    "techniques/precision/float8_linear:Float8Linear.supports#3": Asked(
        (), ("float8_linear",), "V100"
    ),
    "techniques/precision/float8_linear:Float8Linear.supports#4": Asked(
        ("techniques.float8_linear.multiple_of=1",), ("float8_linear",), "H200"
    ),
    "techniques/adapt/distillation:Distillation.supports#3": Asked(
        ("techniques.distillation.teacher=x", "techniques.distillation.top_k=4"),
        ("distillation",),
        base=IMAGES,
    ),
    f"{QAT}.supports#4": Asked((), ("quantization_aware_training",), base=IMAGES),
    f"{QAT}._refuse_group#1": Asked(
        ("techniques.quantization_aware_training.group=48",), ("quantization_aware_training",)
    ),
    f"{QAT}.supports#1": Asked(
        ("techniques.fsdp.gather=bf16", "model.precision=bf16", "mesh.data=2"),
        ("quantization_aware_training", "fsdp"),
    ),
    f"{QAT}.supports#2": Asked(
        ("techniques.quantization_aware_training.start=0.5",),
        ("quantization_aware_training", "cuda_graphs", "torch_compile"),
        "H200",
    ),
    "techniques/precision/fp16_loss_scaling:Fp16LossScaling.supports#1": Asked(
        (), ("fp16_loss_scaling",), "H200"
    ),
    "techniques/precision/tf32:Tf32.supports#1": Asked((), ("tf32",)),
    "techniques/precision/tf32:Tf32.supports#2": Asked((), ("tf32",), "V100"),
    "techniques/precision/tf32:Tf32.supports#3": Asked((), ("tf32",), "H200"),
    "plan/technique:Context.lacks_triton#1": Asked((), ("fused_rope",)),
    "plan/technique:Context.lacks_triton#2": Asked((), ("fused_rope",), "bare H200"),
    "techniques/attention/sliding_window:SlidingWindow.supports#3": Asked(
        ("techniques.sliding_window.between=100", "techniques.sliding_window.window=16"),
        ("sliding_window",),
    ),
    "techniques/attention/short_convolution:ShortConvolution._beside#1": Asked(
        (
            "techniques.sliding_window.window=16",
            "techniques.sliding_window.between=1",
            "techniques.short_convolution.between=1",
        ),
        ("short_convolution", "sliding_window"),
    ),
    "techniques/attention/yarn:Yarn.supports#4": Asked(
        ("techniques.yarn.kind=ntk", "model.head_dim=2"), ("yarn",)
    ),
    "assemble/row_parts:RowPartTechnique.supports#2": Asked(
        ("mesh.context=2", "data.sequence_length=2"), ("context_parallel",)
    ),
}
"""By the site of the refusal."""
HUB, FLA = "techniques/attention/flash_attention_3", "techniques/attention/linear_attention"
EXCUSED = {
    f"{HUB}:FlashAttention3._is_here#3": "needs the package, in a torch that does not know it",
    f"{FLA}:LinearAttention._supports_fla#1": "needs fla on a GPU",
    f"{FLA}:LinearAttention._supports_fla#4": "needs fla on a GPU",
    f"{FLA}:LinearAttention._supports_fla#5": "needs fla on a GPU",
    f"{FLA}:LinearAttention._supports_fla#7": "needs fla and Triton of a version on Hopper",
    f"{FLA}:LinearAttention._supports_fla#8": "needs an old fla",
    "techniques/compile/compile_cache:CompileCache.supports#3": "needs Windows",
    "techniques/compile/compile_cache:CompileCache.supports#7": "needs a user that is not root",
    "techniques/compile/cudnn_autotune:CudnnAutotune.supports#2": "needs a torch without cuDNN",
    "techniques/compile/cudnn_autotune:CudnnAutotune.supports#3": "needs a torch for AMD",
    "techniques/fusion/liger_kernels:LigerKernels.supports#4": "needs an old liger-kernel",
    "techniques/memory/expandable_segments:ExpandableSegments.supports#2": "needs Windows",
    "techniques/memory/kept_memory:KeptMemory.supports#2": "needs another C library",
    "techniques/parallel/cpu_threads:CpuThreads.supports#3": "needs macOS or Windows",
    "techniques/precision/float8_linear:Float8Linear.supports#1": "needs torchao to be away",
    "techniques/data/deduplication:Deduplication.supports#1": "see test_deduplication",
    "assemble/keyed:Keyed.supports#1": "needs a folder of weights; see test_design_keys",
    "techniques/design/rms_norm:RmsNorm.supports#1": "needs a folder of weights; see "
    "tests/cli/test_chain.py",
    "techniques/design/rope:Rope.supports#1": "needs a folder of weights; see test_rope_design",
    "techniques/design/rope:Rope.supports#2": "needs a folder of weights; see test_rope_design",
    f"{FLA}:LinearAttention.supports#2": "that both own a socket is told first",
}
"""Refusals that nothing here can call for, and why."""
