"""Apply the patches without a line of code in the program: TORCHCOMPAT_AUTO=1.

`init` is called at the end of `import torch`, as an entry point of the group "torch.backends", in
every process that imports torch while this distribution is installed. An exception there makes
`import torch` fail, so none gets out; and shut, it is one look at the environment.
"""

from __future__ import annotations

import contextlib
import os
import sys

VARIABLE = "TORCHCOMPAT_AUTO"
_ON = ("1", "on")
_OFF = ("", "0", "off")
_said: set[str] = set()


def init(unset: str = "off") -> None:
    """Apply the patches if TORCHCOMPAT_AUTO says so; `unset` is what counts where it says nothing.

    Raises nothing. Loads nothing if the answer is no, which TORCHCOMPAT=off is as well. A value
    that means nothing is one line on stderr, and no.
    """
    value = (os.environ.get(VARIABLE) or unset).strip().lower()
    if value in _OFF or os.environ.get("TORCHCOMPAT", "").strip().lower() in ("off", "0"):
        return
    try:
        if value not in _ON:
            _say(f"{VARIABLE} is {os.environ[VARIABLE]!r}; it can be 1 or 0. Nothing is applied.")
            return
        from torchcompat.api import apply

        apply()
    except KeyboardInterrupt:  # the user's, not ours to swallow
        raise
    except BaseException as e:  # noqa: BLE001 - SystemExit of a plugin would end the program too
        _say(f"the patches are not applied: {type(e).__name__}: {e}")


def _say(text: str) -> None:
    """One line on stderr, once; where there is no stderr, nobody can be told."""
    if text not in _said and sys.stderr is not None:
        _said.add(text)
        with contextlib.suppress(Exception):  # telling must not be what fails
            sys.stderr.write(f"torchcompat: {text}\n")
