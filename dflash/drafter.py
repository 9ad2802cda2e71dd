"""The DFlash drafter: a small Qwen3-style decoder that fills a whole block at once (paper A.3).

Parameter names are z-lab's, so a checkpoint loads there unchanged. The target's embedding and
head are frozen and belong to the target; they are no parameters of the drafter.

Legend: b batch, S context length, Q block slots in the call (N * B in training, B when decoding),
H hidden, F = T * H features, h query heads, g key/value heads, D head dimension, L = S + Q.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from dflash.attention import Backend, attend, attend_blocks
from dflash.drafter_config import DrafterConfig
from dflash.errors import ConfigError
from dflash.rope import Rope, apply_rope

__all__ = ["Backend", "DraftCache", "Drafter", "DrafterConfig", "DrafterLayer", "RMSNorm", "attend"]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.in_float32(x).to(x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """The same, left in float32 for arithmetic that follows."""
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight.float()


class Attention(nn.Module):
    """Block queries over context keys (the target's fused features) and the block's own keys."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, eps = config.hidden_size, config.rms_norm_eps
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=False)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps)
        self.k_norm = RMSNorm(config.head_dim, eps)

    def queries(self, x_bQH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed and turned queries ``[b, h, Q, D]``."""
        q_bQX = self.q_proj(x_bQH)
        return self._norm_and_turn(q_bQX, self.q_norm, cos, sin)

    def keys_values(self, x_bLH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed and turned) and values ``[b, g, L, D]`` of context or block states."""
        k_bgLD = self._norm_and_turn(self.k_proj(x_bLH), self.k_norm, cos, sin)
        return k_bgLD, self._split_heads(self.v_proj(x_bLH))

    def output(self, attended_bhQD: Tensor) -> Tensor:
        """Merge the heads: ``[b, Q, H]``."""
        merged: Tensor = self.o_proj(attended_bhQD.transpose(1, 2).flatten(2))
        return merged

    def _split_heads(self, x_bLX: Tensor) -> Tensor:
        return x_bLX.view(*x_bLX.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def _norm_and_turn(self, x_bLX: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
        normed = norm.in_float32(self._split_heads(x_bLX))
        return apply_rope(normed, cos, sin).to(x_bLX.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nnf.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DrafterLayer(nn.Module):
    """One decoder layer. ``forward`` is the whole training-time layer, the unit of compilation."""

    def __init__(self, config: DrafterConfig, backend: Backend) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_bQH: Tensor, context_bSH: Tensor, cos_b1LD: Tensor, sin_b1LD: Tensor, mask: Any
    ) -> Tensor:
        """``x`` through the layer, attending to the fused context and to itself.

        ``cos``/``sin`` hold the context's positions, then the block slots'. The context goes
        through the key and value projections only: no input norm, no query, no MLP.
        """
        attention, split = self.self_attn, context_bSH.shape[1]
        cos_ctx, cos_blk = cos_b1LD[:, :, :split], cos_b1LD[:, :, split:]
        sin_ctx, sin_blk = sin_b1LD[:, :, :split], sin_b1LD[:, :, split:]
        normed_bQH = self.input_layernorm(x_bQH)
        q_bhQD = attention.queries(normed_bQH, cos_blk, sin_blk)
        k_ctx, v_ctx = attention.keys_values(context_bSH, cos_ctx, sin_ctx)
        k_blk, v_blk = attention.keys_values(normed_bQH, cos_blk, sin_blk)
        if self.backend == "blocks":
            attended = attend_blocks(q_bhQD, (k_ctx, v_ctx), (k_blk, v_blk), mask)
        else:
            k_bgLD = torch.cat([k_ctx, k_blk], dim=2)
            v_bgLD = torch.cat([v_ctx, v_blk], dim=2)
            attended = attend(q_bhQD, k_bgLD, v_bgLD, mask, self.backend)
        return self.finish(x_bQH, attended)

    def forward_cached(
        self,
        x_bQH: Tensor,
        new_context_bCH: Tensor,
        rope_context: tuple[Tensor, Tensor],
        rope_block: tuple[Tensor, Tensor],
        kept: LayerCache,
    ) -> Tensor:
        """The decode-time layer: new context joins the cache for good, the block does not."""
        attention = self.self_attn
        normed_bQH = self.input_layernorm(x_bQH)
        q_bhQD = attention.queries(normed_bQH, *rope_block)
        kept.append(*attention.keys_values(new_context_bCH, *rope_context))
        k_bgLD, v_bgLD = kept.with_block(*attention.keys_values(normed_bQH, *rope_block))
        return self.finish(x_bQH, attend(q_bhQD, k_bgLD, v_bgLD, None, "sdpa"))

    def finish(self, x_bQH: Tensor, attended_bhQD: Tensor) -> Tensor:
        """What follows the attention: both residual additions and the MLP."""
        x_bQH = x_bQH + self.self_attn.output(attended_bhQD)
        out: Tensor = x_bQH + self.mlp(self.post_attention_layernorm(x_bQH))
        return out


class LayerCache:
    """Context keys and values of one layer, in a buffer with room for one block behind them."""

    def __init__(self, k_bgLD: Tensor, v_bgLD: Tensor) -> None:
        self._k, self._v = k_bgLD, v_bgLD
        self.length = 0

    def append(self, k_bgCD: Tensor, v_bgCD: Tensor) -> None:
        end = self.length + k_bgCD.shape[2]
        self._k[:, :, self.length : end] = k_bgCD
        self._v[:, :, self.length : end] = v_bgCD
        self.length = end

    def with_block(self, k_bgQD: Tensor, v_bgQD: Tensor) -> tuple[Tensor, Tensor]:
        """Context and block together; the block's rows are overwritten by the next append."""
        end = self.length + k_bgQD.shape[2]
        self._k[:, :, self.length : end] = k_bgQD
        self._v[:, :, self.length : end] = v_bgQD
        return self._k[:, :, :end], self._v[:, :, :end]


class DraftCache:
    """The drafter's key/value cache for one decoded sequence, ``max_len`` context positions long.

    Only context is kept: what the drafter computed for a block is speculation and is dropped.
    """

    def __init__(
        self, config: DrafterConfig, max_len: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.max_len = max_len
        shape = (1, config.num_key_value_heads, max_len + config.block_size, config.head_dim)
        self.layers = [
            LayerCache(
                torch.zeros(shape, device=device, dtype=dtype),
                torch.zeros(shape, device=device, dtype=dtype),
            )
            for _ in range(config.num_hidden_layers)
        ]

    @property
    def length(self) -> int:
        """Context positions held."""
        return self.layers[0].length


class Drafter(nn.Module):
    """The drafter, with z-lab's parameter names and nothing else in its ``state_dict``."""

    def __init__(self, config: DrafterConfig, *, backend: Backend = "sdpa") -> None:
        super().__init__()
        self.config = config
        self._compiled = False
        self.layers = nn.ModuleList(
            DrafterLayer(config, backend) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(
            config.head_dim, config.rope_theta, config.rope_scaling, config.max_position_embeddings
        )

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw all matrices from N(0, initializer_range) and set all norms to one, in place."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    drawn = torch.empty(parameter.shape).normal_(
                        0.0, self.config.initializer_range, generator=generator
                    )
                    parameter.copy_(drawn)

    def compile_layers(self, **options: Any) -> None:
        """Compile each layer's ``forward``; all layers share one graph. Options: torch.compile's.

        Shapes are taken as static unless ``dynamic`` is given: pad contexts to a few lengths.
        """
        options.setdefault("dynamic", False)
        options.setdefault("fullgraph", True)
        for layer in self.layers:
            layer.compile(**options)
        self._compiled = True

    def fuse_context(self, context_bSF: Tensor) -> Tensor:
        """``hidden_norm(fc(features))``: ``[b, S, F]`` to ``[b, S, H]``, shared by all layers."""
        if context_bSF.shape[-1] != self.config.feature_size:
            raise ConfigError(
                f"the features are {context_bSF.shape[-1]} wide, but this drafter takes "
                f"{self.config.num_taps} taps of {self.config.hidden_size}"
            )
        if not torch.is_autocast_enabled(context_bSF.device.type):
            context_bSF = self.as_input(context_bSF)
        fused: Tensor = self.hidden_norm(self.fc(context_bSF))
        return fused

    def forward(
        self,
        block_embeds_bQH: Tensor,
        context_bSF: Tensor,
        context_positions_bS: Tensor,
        block_positions_bQ: Tensor,
        mask: Any,
    ) -> Tensor:
        """All blocks of a batch in one pass: hidden states ``[b, Q, H]`` after the final norm.

        ``mask`` is ``mask.block_mask`` of this drafter's backend. Apply the target's head to the
        result; slot k predicts the token at anchor + k.
        """
        x_bQH = self.as_input(block_embeds_bQH)
        if self._compiled and torch.is_grad_enabled():
            # The first layer's input needs no gradient, all others' do: without this the first
            # layer would get a graph of its own and everything would be compiled twice.
            x_bQH = x_bQH.detach().requires_grad_()
        context_bSH = self.fuse_context(context_bSF)
        cos, sin = self.rope(torch.cat([context_positions_bS, block_positions_bQ], dim=1))
        for layer in self.layers:
            x_bQH = layer(x_bQH, context_bSH, cos, sin, mask)
        out: Tensor = self.norm(x_bQH)
        return out

    def forward_cached(
        self,
        block_embeds_1QH: Tensor,
        new_context_1CF: Tensor,
        context_positions_1C: Tensor,
        block_positions_1Q: Tensor,
        cache: DraftCache,
    ) -> Tensor:
        """One block of one sequence: ``[1, Q, H]``.

        Adds the new context to ``cache``; the block itself leaves no trace in it. Raises
        ConfigError when the context or the block is longer than the cache has room for.
        """
        room, new, slots = cache.max_len, new_context_1CF.shape[1], block_embeds_1QH.shape[1]
        if cache.length + new > room or slots > self.config.block_size:
            raise ConfigError(
                f"{cache.length} + {new} context positions and a block of {slots} do not fit a "
                f"draft cache of {room} and blocks of {self.config.block_size}"
            )
        x_1QH = self.as_input(block_embeds_1QH)
        context_1CH = self.fuse_context(new_context_1CF)
        rope_context = self.rope(context_positions_1C)
        rope_block = self.rope(block_positions_1Q)
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            assert isinstance(layer, DrafterLayer)
            x_1QH = layer.forward_cached(x_1QH, context_1CH, rope_context, rope_block, kept)
        out: Tensor = self.norm(x_1QH)
        return out

    def new_cache(self, max_len: int) -> DraftCache:
        """An empty cache for a sequence of at most ``max_len`` context positions."""
        weight = self.norm.weight
        return DraftCache(self.config, max_len, device=weight.device, dtype=weight.dtype)

    def as_input(self, x: Tensor) -> Tensor:
        """``x`` in the type of the residual stream."""
        # The residual stream has the parameters' dtype: float32 under autocast with float32
        # masters, where sums over layers would lose bits in bfloat16.
        return x.to(self.norm.weight.dtype)
