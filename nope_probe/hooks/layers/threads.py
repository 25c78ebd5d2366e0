"""A model is for one thread at a time: the others wait.

Hooks and taps are the model's, so that a pass in another thread would run them too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from threading import Lock, RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary, ref

_LOCKS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_ADDING = Lock()
PATIENCE = 60.0  # seconds after which a thread that waits for a model says so


@contextmanager
def used_alone(model: object) -> Iterator[None]:
    """Let all other threads wait that read, change or run a model, until the context is left.

    Forward passes of this model wait too, from here on. Those of other models do not.
    """
    lock = _lock_of(model)
    if not lock.acquire(timeout=PATIENCE):
        warnings.warn(
            f"this thread has waited {PATIENCE:g} seconds for the model, which another thread "
            "reads or has ablated; passes inside `ablated` belong in the thread that entered it",
            stacklevel=4,
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _lock_of(model: object) -> Any:
    """Return a model's lock, for which its forward passes wait too."""
    with _ADDING:
        if model not in _LOCKS:
            lock = RLock()
            for module in (model, getattr(model, "original_model", None)):  # of a bridge
                if module is None:
                    continue
                _LOCKS[module] = lock
                for name in ("forward", "run_with_hooks", "run_with_cache"):
                    waits = isinstance(vars(module).get(name), _Waiting)  # a copy's methods do
                    if hasattr(module, name) and not waits:
                        vars(module)[name] = _Waiting(module, name)
        return _LOCKS[model]


class _Waiting:
    """A method of a model that waits until no other thread uses the model.

    Args:
        module: the model, which a weak reference does not keep in memory.
        name: the method's name.
        method: the instance's method, in place of its class's.
    """

    def __init__(self, module: Any, name: str, method: Callable[..., Any] | None = None) -> None:
        self.module, self.name = ref(module), name
        self.method = method or vars(module).get(name)
        self.__signature__ = signature(getattr(module, name))

    def __call__(self, *args: object, **options: object) -> object:
        module = self.module()
        run = self.method or getattr(type(module), self.name).__get__(module)
        with used_alone(module):
            return run(*args, **options)

    def __reduce__(self) -> tuple[object, ...]:  # a copy of a model waits for the copy
        return _Waiting, (self.module(), self.name, self.method)


def in_this_thread(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reader that ignores the passes of other threads, which may run already."""
    reading = get_ident()

    def run(*args: object, **options: object) -> object:
        return read(*args, **options) if get_ident() == reading else None

    return run
