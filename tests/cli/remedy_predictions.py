"""Plans whose step's time is not predicted, by the site that tells why."""

PREDICTIONS = {
    "costs/work:Attention.one_s#1": (
        "mesh.context=2 --with context_parallel --with document_packing"
    ),
    "costs/work:Attention.one_s#2": "--with logit_soft_cap",
    "costs/work:Attention.one_s#3": "model.precision=fp32 --with flex_attention",
    "costs/work:Attention._skipping_s#1": "--with document_packing --with flex_attention",
}
"""What is said to `headrace plan demo` for an H200."""
