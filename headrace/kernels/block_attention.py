"""A block of queries attends to a block of keys here, in a form whose results can be merged.

Attention over a long row can be cut into blocks of keys. Each block gives its output and the log of
its sum of exponentials (lse), and outputs merge exactly, weighted by their exponentials. So a block
needs two functions that `scaled_dot_product_attention` hides: a forward pass that returns lse, and
a backward pass that takes the *merged* output and lse. From these every block's probabilities
follow without the others. torch's fused kernels have both beneath the public call. This module is
the one place that calls them, by an explicit rule (`kernel_for`), beside the plain reference that
they equal.

A query that sees nothing has output 0, lse -inf and no gradient, in every kernel. They disagree
about such rows, so hidden scores are large and negative, never -inf, and the rows are written over.

Left out: masks in cuDNN's kernel; the flash kernels take none.
Source: online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135.

Shapes: B rows, t queries, s keys, H query heads, G key-value heads (H is a multiple), K features.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Mask = Literal["full", "causal"] | Tensor
"""Which keys a query sees: all; those up to its own place (t = s); or bool [B or 1, t, s]."""
Kernel = Literal["plain", "flash_cpu", "cudnn", "flash", "efficient"]

HEAD_MULTIPLE = 8
"""What divides the features of a head that the half-precision kernels take."""
WIDEST = {"cudnn": 128, "flash": 256}
"""Kernel -> the most features of a head that it takes."""
_ATEN = torch.ops.aten
_ALIGNED_KEYS = 8
"""The efficient kernel wants rows of a mask to begin at multiples of 16 bytes."""
_ALIGNED_STATISTICS = 32
"""The efficient kernel pads lse to a multiple of this many queries."""
_SHORTEST_CUDNN = 64
"""Tokens below which a block is left to the flash kernel: cuDNN makes a plan for each shape."""


def kernel_for(q_BHtK: Tensor, k_BGsK: Tensor, mask: Mask) -> Kernel:
    """Return the fastest kernel that is right for these queries, keys and this mask."""
    dense, features = isinstance(mask, Tensor), q_BHtK.size(-1)
    half = q_BHtK.dtype in (torch.float16, torch.bfloat16)
    if q_BHtK.is_cpu:
        return "flash_cpu" if q_BHtK.dtype in (torch.float32, torch.bfloat16) else "plain"
    if not q_BHtK.is_cuda or torch.version.hip or not (half or q_BHtK.dtype == torch.float32):
        return "plain"
    capability = torch.cuda.get_device_capability(q_BHtK.device)
    modern = capability >= (8, 0)
    if half and not dense and modern and takes_heads("flash", features):
        long = min(q_BHtK.size(2), k_BGsK.size(2)) >= _SHORTEST_CUDNN
        hopper = capability >= (9, 0)
        return "cudnn" if hopper and takes_heads("cudnn", features) and long else "flash"
    return "efficient" if modern and features % (HEAD_MULTIPLE if half else 4) == 0 else "plain"


def takes_heads(kernel: str, features: int) -> bool:
    """Return whether a half-precision kernel takes heads of so many features, without padding."""
    return features % HEAD_MULTIPLE == 0 and features <= WIDEST[kernel]


def _able(kernel: Kernel, mask: Mask) -> Kernel:
    if kernel in ("cudnn", "flash") and isinstance(mask, Tensor):
        raise ValueError(f"the {kernel} kernel takes no mask")
    return kernel


def block_attention(
    q_BHtK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor, mask: Mask, *, kernel: Kernel | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, t, K] in the queries' dtype and lse fp32 [B, H, t].

    Args:
        q_BHtK: queries.
        k_BGsK: keys.
        v_BGsK: values.
        mask: which keys a query sees.
        kernel: another than `kernel_for` chooses.

    Raises:
        ValueError: that kernel takes no mask, and this one is a tensor.
    """
    kernel = _able(kernel or kernel_for(q_BHtK, k_BGsK, mask), mask)
    if kernel == "plain":
        return _plain(q_BHtK, k_BGsK, v_BGsK, mask)
    causal = mask == "causal" if isinstance(mask, str) else False
    if kernel == "cudnn":
        out, lse = _ATEN._scaled_dot_product_cudnn_attention(
            q_BHtK, k_BGsK, v_BGsK, None, True, 0.0, causal
        )[:2]
        return out, lse.reshape(q_BHtK.shape[:3])
    if kernel == "flash":
        return _ATEN._scaled_dot_product_flash_attention(q_BHtK, k_BGsK, v_BGsK, 0.0, causal)[:2]
    bias = _bias(q_BHtK, mask)
    if kernel == "flash_cpu":
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q_BHtK, *_repeated(q_BHtK, k_BGsK, v_BGsK), 0.0, causal, attn_mask=bias
        )
    else:
        out, lse = _ATEN._scaled_dot_product_efficient_attention(
            q_BHtK, *_repeated(q_BHtK, k_BGsK, v_BGsK), _over_heads(bias, q_BHtK), True, 0.0, causal
        )[:2]
    lse = lse[:, :, : q_BHtK.size(2)].float()
    if isinstance(mask, Tensor):
        blind_B1t = ~mask.any(-1).unsqueeze(1)
        lse = lse.masked_fill(blind_B1t, -torch.inf)
        out = out.masked_fill(blind_B1t[..., None], 0)
    return out, lse


def block_attention_backward(
    do_BHtK: Tensor,
    q_BHtK: Tensor,
    k_BGsK: Tensor,
    v_BGsK: Tensor,
    o_BHtK: Tensor,
    lse_BHt: Tensor,
    mask: Mask,
    *,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's share of the gradients of queries, keys and values.

    Args:
        do_BHtK: gradient of the merged output.
        q_BHtK: queries.
        k_BGsK: keys of this block.
        v_BGsK: values of this block.
        o_BHtK: the merged output, over all blocks.
        lse_BHt: the merged lse, fp32.
        mask: which keys of this block a query sees.
        kernel: another than `kernel_for` chooses.

    Raises:
        ValueError: that kernel takes no mask, and this one is a tensor.
    """
    kernel = _able(kernel or kernel_for(q_BHtK, k_BGsK, mask), mask)
    # exp(anything - inf) is 0: what sees nothing gets no gradient.
    lse_BHt = lse_BHt.masked_fill(lse_BHt == -torch.inf, torch.inf).contiguous()
    if kernel == "plain":
        return _plain_backward(do_BHtK, q_BHtK, k_BGsK, v_BGsK, o_BHtK, lse_BHt, mask)
    causal = mask == "causal" if isinstance(mask, str) else False
    # Some kernels read outputs in the layout of their own: the heads of a token side by side.
    do_BHtK, o_BHtK = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (do_BHtK, o_BHtK))
    seed = torch.empty((), dtype=torch.int64, device=q_BHtK.device)  # of no dropout
    if kernel in ("cudnn", "flash"):
        given = do_BHtK, q_BHtK, k_BGsK, v_BGsK, o_BHtK
        sizes = q_BHtK.size(2), k_BGsK.size(2)
        if kernel == "cudnn":
            rest = lse_BHt.unsqueeze(-1), seed, seed, None, None, None, *sizes, 0.0, causal
            return _ATEN._scaled_dot_product_cudnn_attention_backward(*given, *rest)
        rest = lse_BHt, None, None, *sizes, 0.0, causal, seed, seed
        return _ATEN._scaled_dot_product_flash_attention_backward(*given, *rest)
    given = do_BHtK, q_BHtK, *_repeated(q_BHtK, k_BGsK, v_BGsK)
    bias = _bias(q_BHtK, mask)
    if kernel == "flash_cpu":
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, o_BHtK, lse_BHt, 0.0, causal, attn_mask=bias
        )
    else:
        pad = -lse_BHt.size(2) % _ALIGNED_STATISTICS
        padded = F.pad(lse_BHt, (0, pad), value=torch.inf)
        rest = seed, seed, 0.0, [True, True, True, False], causal
        dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
            *given, _over_heads(bias, q_BHtK), o_BHtK, padded, *rest
        )
    groups = k_BGsK.size(1)
    return dq, _summed(dk, groups), _summed(dv, groups)


# --- the reference ---------------------------------------------------------------------------


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """Compute the definition of attention, in fp32."""
    k, v = _repeated(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        scores_BHts = _scores(q, k, mask)
        lse_BHt = scores_BHts.logsumexp(-1)
        safe_BHt = lse_BHt.masked_fill(lse_BHt == -torch.inf, torch.inf)
        out = (scores_BHts - safe_BHt[..., None]).exp() @ v.float()
    return out.to(q.dtype), lse_BHt


def _plain_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the softmax's gradient written out, in fp32."""
    groups, dtype = k.size(1), q.dtype
    k, v = _repeated(q, k, v)
    with torch.autocast(q.device.type, enabled=False):
        p_BHts = (_scores(q, k, mask) - lse[..., None]).exp()
        do, q, k, v = do.float(), q.float(), k.float(), v.float()
        dot_BHt1 = (do * o.float()).sum(-1, keepdim=True)
        ds_BHts = p_BHts * (do @ v.mT - dot_BHt1) * q.size(-1) ** -0.5
        dq, dk, dv = ds_BHts @ k, ds_BHts.mT @ q, p_BHts.mT @ do
    return dq.to(dtype), _summed(dk, groups).to(dtype), _summed(dv, groups).to(dtype)


def _scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return scaled scores in fp32 [B, H, t, s], -inf where a key is hidden."""
    scores = q.float() @ k.float().mT * q.size(-1) ** -0.5
    if isinstance(mask, Tensor):
        return scores.masked_fill(~mask.unsqueeze(1), -torch.inf)
    if mask == "causal":
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf)
    return scores


# --- what kernels want -----------------------------------------------------------------------


def _repeated(q_BHtK: Tensor, k_BGsK: Tensor, v_BGsK: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for each query head, for kernels that know no groups."""
    each = q_BHtK.size(1) // k_BGsK.size(1)
    if each == 1:
        return k_BGsK, v_BGsK
    return k_BGsK.repeat_interleave(each, 1), v_BGsK.repeat_interleave(each, 1)


def _summed(grad_BHsK: Tensor, groups: int) -> Tensor:
    """Return the gradient of `_repeated`: the sum over the query heads of each group."""
    if grad_BHsK.size(1) == groups:
        return grad_BHsK
    return grad_BHsK.unflatten(1, (groups, -1)).sum(2)


def _bias(q: Tensor, mask: Mask) -> Tensor | None:
    """Return a dense mask as numbers that are added to scores, [B or 1, 1, t, s]."""
    if not isinstance(mask, Tensor):
        return None
    hidden = max(-1e30, torch.finfo(q.dtype).min)
    rows, queries, keys = mask.shape
    wide = torch.zeros(
        (rows, 1, queries, keys + -keys % _ALIGNED_KEYS), dtype=q.dtype, device=q.device
    )
    return wide[..., :keys].masked_fill_(~mask.unsqueeze(1), hidden)


def _over_heads(bias: Tensor | None, q: Tensor) -> Tensor | None:
    return bias if bias is None else bias.expand(q.size(0), q.size(1), -1, -1)
