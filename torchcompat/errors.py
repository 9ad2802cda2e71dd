"""What torchcompat raises and warns with.

TorchCompatError
├── ConfigError            a setting, patch id or environment variable that means nothing
├── PluginError            an entry point that does not give usable patches
├── WarmupError            a call that `warmup` made raised; names the example and the device
└── PatchError             one patch; `patch_id` is None where the raiser cannot know it
    ├── TargetNotFound     the name that the patch replaces does not exist in this torch
    ├── SourceDrift        it exists but is not the code that the patch was written for
    ├── PatchConflict      another patch already has hold of it
    └── PatchNotApplied    a patch asked for by name, or under strict, did not come to be applied

TorchCompatWarning
└── RecompileLimitWarning  torch stops compiling a function: it has as many versions as it may
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchcompat.verdict import Verdict


class TorchCompatError(Exception):
    """Base of all errors of this package."""


class ConfigError(TorchCompatError):
    """A setting, patch id or environment variable that means nothing; says what is allowed."""


class PluginError(TorchCompatError):
    """An entry point that does not give usable patches."""


class PatchError(TorchCompatError):
    """Something about one patch."""

    def __init__(self, message: str, *, patch_id: str | None = None) -> None:
        super().__init__(message)
        self.patch_id = patch_id


class TargetNotFound(PatchError):
    """The name that a patch replaces does not exist in this torch."""


class SourceDrift(PatchError):
    """The target exists but is not the code that the patch was written for."""


class PatchConflict(PatchError):
    """Another patch already has hold of the target."""


class PatchNotApplied(PatchError):
    """A patch asked for by name, or under strict, did not come to be applied."""

    def __init__(self, patch_id: str, verdict: Verdict) -> None:
        super().__init__(
            f"patch {patch_id!r} is {verdict.state.value}: {verdict.reason}", patch_id=patch_id
        )
        self.verdict = verdict

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.patch_id, self.verdict))


class WarmupError(TorchCompatError):
    """A call that `warmup` made raised, or came to the recompile limit. `item` is the example's
    name, `device` where it ran; the cause is the exception itself."""

    def __init__(self, item: str, device: str, number: str, error: Exception) -> None:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        if type(error).__name__ == "FailOnRecompileLimitHit":
            first += (
                ". It would run uncompiled: warm up fewer shapes, use dynamic=True, or raise "
                "torch._dynamo.config.recompile_limit (cache_size_limit up to 2.6)"
            )
        super().__init__(
            f"warmup {number}, {item} on {device}: {type(error).__name__}: {first}",
        )
        self.item = item
        self.device = device
        self._made_from = (item, device, number, error)

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), self._made_from)


class TorchCompatWarning(UserWarning):
    """Base of all warnings of this package."""


class RecompileLimitWarning(TorchCompatWarning):
    """A function has as many compiled versions as it may: what needs another runs uncompiled."""


def nearest(name: str, allowed: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """The closing words of an "unknown X" message: the nearest match, else what is allowed.

    `shown` gives the texts for names that are compared in another form than they are written in.
    """
    import difflib  # here for the sake of a quick start

    names = sorted(allowed)
    close = difflib.get_close_matches(name, names, n=1)
    texts = shown or {n: n for n in names}
    if close:
        return f"did you mean {texts[close[0]]!r}?"
    few = ", ".join(texts[n] for n in names) if len(names) <= 12 else f"{len(names)} others"
    return f"known: {few or 'none'}"
