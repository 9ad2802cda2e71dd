"""A short forward pass for decoder models built like Llama, for decoding on few cores.

It runs the weights of transformers' own modules, without their per-layer overhead, and keeps keys
and values in tensors that are allocated once and written in place. Rows may stand at different
positions: key ``p`` of a row is its token at position ``p``, so a row needs no left padding, and
what an unfinished write left behind lies beyond the positions that a query may see.

Legend: b rows, C new tokens, S cached positions in reach, H hidden, n query heads, m key heads,
g = n / m, D head dimension.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LeanCache", "LeanDecoder", "project"]

_LAYER_CLASSES = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)

# Attention reads the cache up to the next multiple of this, so that shapes repeat.
_REACH_STEP = 64


class LeanCache:
    """Keys and values of every layer, ``[b, m, max_len, D]`` each."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], max_len: int) -> None:
        self.keys = keys
        self.values = values
        self.max_len = max_len

    def rows(self, start: int, end: int) -> LeanCache:
        """A view of some rows; what is written to it is written here."""
        keys, values = ([part[start:end] for part in whole] for whole in (self.keys, self.values))
        return LeanCache(keys, values, self.max_len)

    def grow(self, positions: int) -> None:
        """Make room for so many positions more."""
        for tensors in (self.keys, self.values):
            for number, tensor in enumerate(tensors):  # one layer's copy at a time
                tensors[number] = F.pad(tensor, (0, 0, 0, positions))
        self.max_len += positions

    def move(self, source: int, row: int) -> None:
        """Copy one row over another, in place."""
        for tensor in (*self.keys, *self.values):
            tensor[row].copy_(tensor[source])

    def select(self, rows: Tensor) -> None:
        """Keep these rows only, in this order."""
        for tensors in (self.keys, self.values):
            for number, tensor in enumerate(tensors):
                tensors[number] = tensor.index_select(0, rows)


class LeanDecoder:
    """The decoder stack of one model, as a pure function of tokens, positions and cache.

    It holds no state of its own: any number of threads may run it, each with its own cache.
    """

    def __init__(self, decoder: nn.Module, head_dim: int, num_key_value_heads: int) -> None:
        self._embed: Any = decoder.embed_tokens
        self._rotary: Any = decoder.rotary_emb
        self._norm: Any = decoder.norm
        self._layers: list[Any] = list(decoder.layers)  # type: ignore[arg-type]
        self._head_dim = head_dim
        self._key_heads = num_key_value_heads

    @staticmethod
    def of(decoder: nn.Module, config: Any) -> LeanDecoder | None:
        """The lean form of a transformers decoder stack, or None if it is built otherwise."""
        layers = getattr(decoder, "layers", None)
        if layers is None or {type(layer).__name__ for layer in layers} - _LAYER_CLASSES:
            return None
        kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
        windowed = getattr(config, "layer_types", None) is None and (
            getattr(config, "sliding_window", None) is not None
            and getattr(config, "use_sliding_window", True)
        )
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        kind_of_rope = (rope or {}).get("rope_type", "default")
        # "dynamic" and "longrope" choose their frequencies by the longest position of the call.
        if kinds != {"full_attention"} or windowed or kind_of_rope in ("dynamic", "longrope"):
            return None
        if config.hidden_act != "silu":
            return None
        head_dim = getattr(config, "head_dim", None)
        return LeanDecoder(
            decoder,
            head_dim or config.hidden_size // config.num_attention_heads,
            config.num_key_value_heads,
        )

    def new_cache(self, rows: int, max_len: int) -> LeanCache:
        """An empty cache for ``rows`` sequences of up to ``max_len`` tokens."""
        weight = self._embed.weight
        shape = (rows, self._key_heads, max_len, self._head_dim)
        # Zeros, not empty: a masked key still takes part as 0 * value, and 0 * NaN is NaN.
        keys, values = ([weight.new_zeros(shape) for _ in self._layers] for _ in ("keys", "values"))
        return LeanCache(keys, values, max_len)

    def run(
        self,
        ids_bC: Tensor,
        starts: int | Tensor,
        cache: LeanCache,
        taps: Collection[int] = (),
        *,
        reach: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Append C tokens to every row: ``(hidden_bCH after the final norm, {layer: output})``.

        ``starts`` is the position of the first new token: one for all rows, or int64 ``[b]``.
        ``taps`` are the layers whose outputs are wanted. With ``reach``, at least the longest
        row's new length, so many cached positions are read and nothing is asked of the device
        that the host would have to wait for.
        """
        place = _Place.at(ids_bC, starts, cache.max_len, reach)
        x_bCH: Tensor = self._embed(ids_bC)
        rope = self._rotary(x_bCH, place.positions_bC)
        tapped: dict[int, Tensor] = {}
        for number, layer in enumerate(self._layers):
            keys, values = cache.keys[number], cache.values[number]
            normed_bCH = _rms_norm(x_bCH, layer.input_layernorm)
            x_bCH = x_bCH + self._attend(layer.self_attn, normed_bCH, rope, keys, values, place)
            normed_bCH = _rms_norm(x_bCH, layer.post_attention_layernorm)
            gate, up, down = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
            x_bCH = x_bCH + project(
                F.silu(project(normed_bCH, gate)) * project(normed_bCH, up), down
            )
            if number in taps:
                tapped[number] = x_bCH
        return _rms_norm(x_bCH, self._norm), tapped

    def _attend(
        self,
        part: Any,
        x_bCH: Tensor,
        rope: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        place: _Place,
    ) -> Tensor:
        heads = (*x_bCH.shape[:2], -1, self._head_dim)
        q_bnCD, k_bmCD, v_bmCD = (
            project(x_bCH, projection).view(heads).transpose(1, 2)
            for projection in (part.q_proj, part.k_proj, part.v_proj)
        )
        if hasattr(part, "q_norm"):
            q_bnCD, k_bmCD = _rms_norm(q_bnCD, part.q_norm), _rms_norm(k_bmCD, part.k_norm)
        place.write(keys, _turned(k_bmCD, rope))
        place.write(values, v_bmCD)
        mixed_bnCD = _attention(_turned(q_bnCD, rope), keys, values, place)
        return project(mixed_bnCD.transpose(1, 2).flatten(2), part.o_proj)


class _Place:
    """Where the new tokens of a call go, and what they may see."""

    def __init__(
        self, positions_bC: Tensor, first: int | None, reach: int, visible: Tensor | None
    ) -> None:
        self.positions_bC = positions_bC
        self.first = first
        """Position of the first new token, where it is the same in all rows."""
        self.reach = reach
        """S: so many cached positions are read."""
        self.visible_b1CS = visible
        """None: every row starts at 0, plain causal attention."""
        self._rows = torch.arange(len(positions_bC), device=positions_bC.device)

    @staticmethod
    def at(
        ids_bC: Tensor, starts: int | Tensor, max_len: int, asked_reach: int | None = None
    ) -> _Place:
        new = ids_bC.shape[1]
        steps_C = torch.arange(new, device=ids_bC.device)
        if isinstance(starts, int):
            first, last = starts, starts + new
            positions_bC = (starts + steps_C).expand(len(ids_bC), new)
        else:
            first, last = None, asked_reach or int(starts.max()) + new
            positions_bC = starts.unsqueeze(1) + steps_C
        assert last <= max_len, f"the cache holds {max_len} positions, {last} are needed"
        if first == 0:
            return _Place(positions_bC, 0, new, None)
        reach = asked_reach or min(max_len, -(-last // _REACH_STEP) * _REACH_STEP)
        keys_S = torch.arange(reach, device=ids_bC.device)
        visible_bCS = keys_S <= positions_bC.unsqueeze(-1)
        return _Place(positions_bC, first, reach, visible_bCS.unsqueeze(1))

    def write(self, cached: Tensor, new_bmCD: Tensor) -> None:
        if self.first is None:
            cached[self._rows.unsqueeze(1), :, self.positions_bC] = new_bmCD.transpose(1, 2)
        else:
            cached[:, :, self.first : self.first + new_bmCD.shape[2]] = new_bmCD


def project(x: Tensor, layer: nn.Linear) -> Tensor:
    """`layer(x)`, by the product that is quicker for the few rows of a decoding step on a CPU.

    For 2 to 8 rows in float32 the usual product spends more on repacking the weights than on
    multiplying; with the weights on the left it does not. Measured for 4 rows, times as fast:
    576 -> 1536 1.3, 576 -> 49152 1.8, but 1536 -> 576 0.6; so only where the layer widens.
    """
    rows = x.numel() // x.shape[-1]
    few = 1 < rows <= 8 and x.dtype == torch.float32 and x.device.type == "cpu"
    if not few or layer.out_features < layer.in_features:
        out: Tensor = layer(x)
        return out
    flat = layer.weight @ x.reshape(rows, -1).t()
    if layer.bias is not None:
        flat = flat + layer.bias.unsqueeze(1)
    return flat.t().reshape(*x.shape[:-1], -1)


def _attention(q_bnCD: Tensor, keys: Tensor, values: Tensor, place: _Place) -> Tensor:
    k_bmSD, v_bmSD = keys[:, :, : place.reach], values[:, :, : place.reach]
    attend = F.scaled_dot_product_attention
    if q_bnCD.shape[2] > 1:
        return attend(
            q_bnCD,
            k_bmSD,
            v_bmSD,
            attn_mask=place.visible_b1CS,
            is_causal=place.visible_b1CS is None,
            enable_gqa=True,
        )
    # One query per head: the g heads that share keys pass for g queries, and keys are read once.
    b, _, _, head_dim = q_bnCD.shape
    grouped_bmgD = q_bnCD.reshape(b, k_bmSD.shape[1], -1, head_dim)
    mixed_bmgD = attend(grouped_bmgD, k_bmSD, v_bmSD, attn_mask=place.visible_b1CS)
    return mixed_bmgD.flatten(1, 2).unsqueeze(2)


def _turned(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, on halves (i, i + D/2) of every head."""
    cos, sin = (part.unsqueeze(1) for part in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _rms_norm(x: Tensor, norm: Any) -> Tensor:
    """As transformers rounds it: the mean in float32, the weight in the model's type."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    weighted: Tensor = norm.weight * wide.to(x.dtype)
    return weighted
