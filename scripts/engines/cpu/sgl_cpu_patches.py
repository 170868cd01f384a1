"""Make SGLang importable on a machine without a GPU; import this before sglang.

Two packages that SGLang imports unconditionally have no CPU build worth installing:
torchvision and sgl_kernel. Both get stand-ins here. No function of SGLang is replaced: with
`SGLANG_USE_CPU_ENGINE=1` a plain Llama runs on torch operators alone.

One set of patches serves SGLang 0.5.9, 0.5.15.post1 and 0.5.23; what only one of them needs
says so, and does nothing in the others.
"""

import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

TORCHVISION_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)

KERNEL_MODULES = (
    "sgl_kernel",
    "sgl_kernel.kvcacheio",  # 0.5.9 imports it, and guards its imports of the others
)


class _Stub(types.ModuleType):
    """A package that has every public attribute, each of them another stub."""

    def __init__(self, name: str) -> None:
        """Look like a package whose submodules are registered by hand."""
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        """Refuse dunder names, so that introspection sees an ordinary module."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._attribute(name)

    def _attribute(self, name: str) -> Any:
        return _Stub(f"{self.__name__}.{name}")


class _KernelStub(_Stub):
    """A package whose every public attribute is a kernel that cannot run."""

    __version__ = "999.0.0"

    def _attribute(self, name: str) -> Callable[..., Any]:
        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} has no CPU implementation here")

        return missing


def _register(stub: _Stub) -> None:
    """Put a stub into `sys.modules` as if it had been imported from a package."""
    stub.__spec__ = ModuleSpec(stub.__name__, loader=None, is_package=True)
    sys.modules[stub.__name__] = stub


def _settle_transformers() -> None:
    """Have transformers look for torchvision, and remember the answer, before the stub exists."""
    from transformers.utils import import_utils

    if import_utils.is_torchvision_available():
        raise RuntimeError("torchvision must not be installed beside the CPU engine")
    import_utils.is_torchvision_v2_available()


def _let_image_processors_register() -> None:
    """SGLang 0.5.15 registers image processors at import, with a class that its transformers
    cannot offer without torchvision: the stand-in for such a class takes registrations."""
    from transformers.utils.import_utils import DummyObject

    refuse = DummyObject.__getattribute__

    def attribute(cls: type, name: str) -> Any:
        return (lambda *_args, **_kwargs: None) if name == "register" else refuse(cls, name)

    DummyObject.__getattribute__ = attribute


def apply() -> None:
    """Set the environment and register the stand-ins."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # On busy cores, threads that wait for each other cost a tiny model far more than they give.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _settle_transformers()
    _let_image_processors_register()
    for name in TORCHVISION_MODULES:
        _register(_Stub(name))
    for name in KERNEL_MODULES:
        _register(_KernelStub(name))


apply()
