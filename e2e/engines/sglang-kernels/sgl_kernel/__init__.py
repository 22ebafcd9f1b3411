"""In the place of SGLang's GPU kernels: every name can be imported, none can be called.

Without a GPU SGLang computes with plain torch, yet imports names of this package. A call raises, so what runs is SGLang's
own Python or nothing.
"""
import importlib.machinery
import sys
import types


class Kernel:
    def __init__(self, name):
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self.__name__} is a GPU kernel, and there is no GPU")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Kernel(f"{self.__name__}.{name}")


class Module(types.ModuleType):
    __getattr__ = Kernel.__getattr__


class Modules:
    """Finds and makes every submodule."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, Modules, is_package=True)
        return None

    @staticmethod
    def create_module(spec):
        return Module(spec.name)

    @staticmethod
    def exec_module(module):
        """Nothing to run."""


sys.meta_path.append(Modules)


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Kernel(f"{__name__}.{name}")
