"""A tiny random target that any dflash test can use, and drafters that fit it.

`FakeTarget` has the interface of `dflash.target.Target` and is written without dflash: complex
rotations, explicit softmax, a "cache" that is the list of tokens so far. Its random weights are
fixed by the seed, so its greedy text is too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dflash.drafter import Drafter, DrafterConfig


@dataclass(frozen=True)
class FakeSpec:
    name: str = "fake"
    hidden_size: int = 16
    num_layers: int = 4
    vocab_size: int = 37
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 8
    intermediate_size: int = 24
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000.0
    rope_scaling: dict[str, object] | None = None
    max_position_embeddings: int = 256
    eos_ids: tuple[int, ...] = (2,)
    pad_id: int = 0
    tie_word_embeddings: bool = False
    fingerprint: str = "fake-0"


class FakeCache:
    def __init__(self, max_len: int) -> None:
        self.max_len = max_len
        self.ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self.ids)

    def crop(self, length: int) -> None:
        assert 0 <= length <= len(self.ids)
        del self.ids[length:]


class FakeTarget:
    def __init__(
        self,
        layer_ids: tuple[int, ...] = (0, 2),
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        spec: FakeSpec | None = None,
    ) -> None:
        self.spec = spec or FakeSpec()
        self.layer_ids = layer_ids
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.tokenizer = None
        self.steps = 0
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            value = torch.randn(*shape, generator=generator) * scale / math.sqrt(shape[-1])
            return value.to(dtype)

        s = self.spec
        q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.embed_weight = draw(s.vocab_size, s.hidden_size, scale=4.0)
        # Not tied: a tied head makes random weights repeat one token for ever.
        self.head_weight = draw(s.vocab_size, s.hidden_size, scale=8.0)
        self.layers = [
            {
                "q": draw(q, s.hidden_size, scale=2.0),
                "k": draw(kv, s.hidden_size, scale=2.0),
                "v": draw(kv, s.hidden_size),
                "o": draw(s.hidden_size, q, scale=3.0),
                "gate": draw(s.intermediate_size, s.hidden_size),
                "up": draw(s.intermediate_size, s.hidden_size),
                "down": draw(s.hidden_size, s.intermediate_size, scale=3.0),
            }
            for _ in range(s.num_layers)
        ]

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_weight[ids]

    def head(self, hidden: Tensor) -> Tensor:
        return (hidden.to(self.dtype) @ self.head_weight.T).float()

    def features(
        self, ids_bS: Tensor, lengths_b: Tensor, *, last_hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        outputs, last = self._run(ids_bS)
        context = torch.cat([outputs[i] for i in self.layer_ids], dim=-1)
        return context, last if last_hidden else None

    def new_cache(self, max_len: int) -> FakeCache:
        return FakeCache(max_len)

    def step(self, ids_1C: Tensor, cache: FakeCache, *, taps: bool) -> tuple[Tensor, Tensor | None]:
        self.steps += 1
        count = ids_1C.shape[1]
        cache.ids += ids_1C[0].tolist()
        assert cache.length <= cache.max_len, "the caller asked for too short a cache"
        outputs, last = self._run(torch.tensor([cache.ids]))
        context = torch.cat([outputs[i] for i in self.layer_ids], dim=-1)[:, -count:]
        return self.head(last[:, -count:]), context if taps else None

    def _norm(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps).sqrt()

    def _turn(self, x_bShD: Tensor) -> Tensor:
        half = self.spec.head_dim // 2
        frequency = self.spec.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x_bShD.shape[1], dtype=torch.float64)[:, None] * frequency
        wide = x_bShD.double()
        turned = torch.complex(wide[..., :half], wide[..., half:]) * torch.polar(
            torch.ones_like(angle), angle
        ).unsqueeze(1)
        return torch.cat([turned.real, turned.imag], dim=-1).to(x_bShD.dtype)

    def _run(self, ids_bS: Tensor) -> tuple[list[Tensor], Tensor]:
        s = self.spec
        x = self.embed_weight[ids_bS]
        batch, length, _ = x.shape
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        outputs = []
        for w in self.layers:
            y = self._norm(x)
            q = self._turn((y @ w["q"].T).view(batch, length, -1, s.head_dim))
            k = self._turn((y @ w["k"].T).view(batch, length, -1, s.head_dim))
            v = (y @ w["v"].T).view(batch, length, -1, s.head_dim)
            scores = torch.einsum("bqhd,bkgd->bhqk", q, k) / math.sqrt(s.head_dim)
            weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
            mixed = torch.einsum("bhqk,bkgd->bqhd", weights, v).reshape(batch, length, -1)
            x = x + mixed @ w["o"].T
            y = self._norm(x)
            x = x + (torch.nn.functional.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
            outputs.append(x)
        return outputs, self._norm(x)


@pytest.fixture(autouse=True)
def one_cpu_thread() -> None:
    """Tiny tensors gain nothing from threads, and beside other work they wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def make_target() -> Callable[..., FakeTarget]:
    """`make_target(layer_ids=(0, 2), seed=0, dtype=…, spec=…)`."""
    return FakeTarget


@pytest.fixture
def fake_target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
def make_drafter() -> Callable[..., Drafter]:
    """`make_drafter(seed=0, **DrafterConfig fields)`: a random drafter that fits `FakeTarget`."""

    def build(seed: int = 0, **changes: object) -> Drafter:
        spec = FakeSpec()
        fields: dict[str, object] = {
            "hidden_size": spec.hidden_size,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": spec.vocab_size,
            "num_target_layers": spec.num_layers,
            "target_layer_ids": (0, 2),
            "block_size": 4,
            "mask_token_id": spec.vocab_size - 1,
            "rope_theta": spec.rope_theta,
            "initializer_range": 0.2,
        }
        drafter = Drafter(DrafterConfig(**(fields | changes)))  # type: ignore[arg-type]
        drafter.reset_parameters(torch.Generator().manual_seed(seed))
        return drafter

    return build
