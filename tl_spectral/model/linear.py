"""A hooked model whose blocks are given linear maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

LINEAR_VOCABULARY, LINEAR_CONTEXT = 32, 16


def boot_linear(
    matrices: Sequence[Float[Tensor, "d d"]],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    name: str = "linear toy",
) -> Any:
    """A native ``TransformerBridge`` in which block l maps ``h`` to ``J_l h``, exactly.

    Attention is there and writes nothing; there are no norms; the MLP reads every coordinate twice,
    with either sign, and since ``relu(x) − relu(−x) = x`` it is the linear map ``J_l − I``. So J_l
    is the block's Jacobian at every token and position, in either context.

    Args:
        matrices: The maps, all of one size.
        seed: Seed of the embedding.
        dtype: dtype of the weights.
        name: Name of the model.

    Returns:
        The model, in evaluation mode, with 32 tokens and room for 16 positions.
    """
    from transformer_lens import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    d = len(matrices[0])
    config = TransformerBridgeConfig(
        d_model=d,
        d_head=d,
        n_heads=1,
        n_layers=len(matrices),
        n_ctx=LINEAR_CONTEXT,
        d_vocab=LINEAR_VOCABULARY,
        d_mlp=2 * d,
        act_fn="relu",
        normalization_type=None,
        model_name=name,
        seed=seed,
    )
    with torch.random.fork_rng(devices=[]):
        model = TransformerBridge.boot_native(config, dtype=dtype)
    eye = torch.eye(d, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in (model.embed, model.pos_embed, model.unembed):
            for parameter in part.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for block, J in zip(model.blocks, matrices, strict=True):
            for parameter in (*block.attn.o.parameters(), *block.mlp.parameters()):
                parameter.zero_()
            update = J.detach().to("cpu", torch.float64) - eye
            _weight(block.mlp, "in").copy_(torch.cat([eye, -eye]))
            _weight(block.mlp, "out").copy_(torch.cat([update, -update], dim=1))
    model.cfg.model_name = name
    return model.eval()


def _weight(mlp: Any, side: str) -> Tensor:
    """The stored ``[out, in]`` matrix of the MLP's first or second map."""
    weight: Tensor = getattr(mlp, side).original_component.weight
    return weight
