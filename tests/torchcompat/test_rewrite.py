"""Recompiled functions mean the same, and a rewritten global is each thread's own."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import textwrap
import threading

import pytest

from torchcompat import ThreadLocal
from torchcompat.errors import SourceDrift
from torchcompat.install import set_all
from torchcompat.rewrite import (
    embed,
    functions_using,
    recompile,
    rewrite_globals,
    thread_value,
    uses_global,
)

SOURCE = '''
import contextlib
import functools

_flag = False
other = 3


def get():
    return _flag


def put(value):
    global _flag
    previous, _flag = _flag, value
    return previous


@contextlib.contextmanager
def flagged(value):
    global _flag, other
    prior = _flag
    _flag = value
    try:
        yield prior
    finally:
        _flag = prior


class Thing:
    __secret = 5

    def method(self, x, /, y=2, *rest, key=None, **more):
        """Doc."""
        return x, y, rest, key, more, _flag, self.__secret, __class__.__name__

    @staticmethod
    def fixed():
        return _flag

    @property
    def shown(self):
        return _flag


def outer(a, b):
    def inner(c):
        if _flag:
            return a + b + c
        return [
            a * item
            for item in (b, c)
            if not _flag
        ]
    return inner


def shadow(_flag):
    return _flag


def generate():
    while not _flag:
        yield 1


first = lambda: _flag
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    path = tmp_path / "sample_of_torch.py"
    path.write_text(textwrap.dedent(SOURCE))
    spec = importlib.util.spec_from_file_location("sample_of_torch", path)
    found = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sample_of_torch", found)
    spec.loader.exec_module(found)
    return found


def same(function):
    return recompile(function, lambda node: node)


def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(10)
    return found[0]


def test_users_are_found_in_functions_methods_and_behind_decorators(module):
    names = [f.__qualname__ for f in functions_using(module, "_flag")]
    assert names == [
        "get",
        "put",
        "flagged",
        "Thing.method",
        "Thing.fixed",
        "Thing.shown",
        "outer",
        "generate",
        "<lambda>",
    ]
    assert not uses_global(module.shadow.__code__, "_flag")


def test_recompiled_functions_behave_the_same(module):
    thing = module.Thing()
    for name, call in (
        ("method", lambda: thing.method(1, 3, 4, key=5, z=6)),
        ("fixed", module.Thing.fixed),
    ):
        function = getattr(module.Thing, name)
        before = call()
        code = same(function)
        assert code.co_flags == function.__code__.co_flags
        assert code.co_firstlineno == function.__code__.co_firstlineno
        assert code.co_filename == function.__code__.co_filename
        function.__code__ = code
        assert call() == before
    inner = module.outer(2, 3)
    before = inner(4)
    inner.__code__ = same(inner)
    assert inner(4) == before == [6, 8]
    assert module.Thing.method.__doc__ == "Doc."


def test_tracebacks_show_the_real_lines(module):
    code = same(module.Thing.method)
    assert list(code.co_lines())[-1][2] == list(module.Thing.method.__code__.co_lines())[-1][2]


def test_a_rewritten_global_is_read_and_written_in_the_holder(module):
    holder = thread_value("own")
    module.put.__code__ = rewrite_globals(module.put, {"_flag": holder})
    assert module.put("new") == "own"
    assert holder.value == "new"
    assert module._flag is False


def test_a_function_that_cannot_be_read_is_drift(module):
    namespace = {"_flag": 1, "__name__": "nowhere"}
    exec("def made():\n    return _flag\n", namespace)
    with pytest.raises(SourceDrift, match="no readable source for made"):
        same(namespace["made"])
    with pytest.raises(SourceDrift):  # the text of a lambda is part of another statement
        same(module.first)


def test_a_change_of_the_arguments_is_refused(module):
    def drop(node):
        node.args.args = []
        node.body = node.body[-1:]
        return node

    with pytest.raises(SourceDrift, match="differs in co_argcount"):
        recompile(module.put, drop)


def test_source_that_was_edited_on_disk_is_not_taken_for_the_code(module):
    """The file has other lines than the code that was made from it."""
    import linecache

    lines = linecache.getlines(module.__file__)
    entry = linecache.cache[module.__file__]
    linecache.cache[module.__file__] = (entry[0], None, ["# new\n"] * 4 + lines, entry[3])
    with pytest.raises(SourceDrift):
        same(module.get)
    linecache.clearcache()


def test_embed_reaches_nested_functions():
    def outer():
        def inner():
            return "<torchcompat> mark"

        return inner

    mark = object()
    outer.__code__ = embed(outer.__code__, {"<torchcompat> mark": mark})
    assert outer()() is mark


def without_lambda(module):
    """A lambda's source cannot be recompiled, so a module with one that reads the global drifts."""
    del module.first
    return ThreadLocal(module="sample_of_torch", name="_flag", default=False)


def test_thread_local_finds_why_not(module):
    assert ThreadLocal(module="sample_of_torch", name="gone").inspect().kind == "missing"
    assert ThreadLocal(module="sample_of_torch", name="_flag").inspect().kind == "drifted"
    edit = without_lambda(module)
    assert edit.inspect().kind == "ok"
    fixed = ThreadLocal(module="sample_of_torch", name="_flag", fixed_by=("no", "other"))
    assert fixed.inspect().kind == "fixed"
    assert ThreadLocal(module="sample_of_torch", name="other").inspect().kind == "drifted"


def test_each_thread_has_its_own_value_through_every_door(module):
    edit = without_lambda(module)
    aliases = module.get, module.put, module.flagged, module.Thing()
    identities = [id(module.get), id(module.put)]
    before = [f.__code__ for f in functions_using(module, "_flag")]
    slots = edit.build()
    set_all(slots, [])
    get, put, flagged, thing = aliases
    assert put("mine") is False
    with flagged("inside") as prior:
        assert prior == "mine"
        assert get() == module._flag == thing.fixed() == thing.shown == "inside"
        assert in_thread(get) is False
        assert in_thread(lambda: module._flag) is False
        assert in_thread(lambda: (setattr(module, "_flag", "theirs"), get()))[1] == "theirs"
        assert get() == "inside"
    assert get() == "mine"
    assert pickle.loads(pickle.dumps(get)) is get
    for slot in reversed(slots):
        assert slot.undo() == "restored"
    assert [id(module.get), id(module.put)] == identities
    assert [f.__code__ for f in functions_using(module, "_flag")] == before
    assert type(module) is type(sys)
    assert module._flag is False


def test_a_call_under_way_survives_the_undoing(module):
    edit = without_lambda(module)
    slots = edit.build()
    set_all(slots, [])
    open_block = module.flagged("inside")
    open_block.__enter__()
    for slot in reversed(slots):
        slot.undo()
    open_block.__exit__(None, None, None)  # writes where it read, not into the module
    assert module._flag is False


def test_values_changed_in_place_begin_anew_in_each_thread(module):
    del module.first
    module._flag = started = {}
    slots = ThreadLocal(module="sample_of_torch", name="_flag", fresh=dict).build()
    set_all(slots, [])
    assert module.get() is started, "the main thread goes on with what others may hold"
    module.get()["mine"] = 1
    assert in_thread(module.get) == {}
    assert in_thread(lambda: module.get() is module.get())
    for slot in reversed(slots):
        slot.undo()
    assert module._flag is started


def test_an_optional_global_that_is_not_there_needs_nothing(module):
    edit = ThreadLocal(module="sample_of_torch", name="gone", optional=True)
    assert edit.inspect().kind == "ok"
    assert edit.build() == []
