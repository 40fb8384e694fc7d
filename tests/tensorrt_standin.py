"""A `tensorrt` to import where its library is not: the real bindings over stubs, and fakes for what needs a library.

The bindings wheel wants three shared libraries, of which it takes eleven C functions. Empty ones let it load: classes,
enums and signatures are then the real ones, and plugin objects, fields and descriptions of tensors work. Builder,
parser, runtime and registry are those of `tests.tensorrt_fakes`; so are DimsExprs, whose expressions only TensorRT
makes.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
_STUB = """
void *createInferBuilder_INTERNAL(void *a, int b) { return 0; }
void *createInferRefitter_INTERNAL(void *a, void *b, int c) { return 0; }
void *createInferRuntime_INTERNAL(void *a, int b) { return 0; }
void *createNvOnnxParserRefitter_INTERNAL(void *a, void *b, int c) { return 0; }
void *createNvOnnxParser_INTERNAL(void *a, void *b, int c) { return 0; }
int getNvOnnxParserVersion(void) { return 0; }
int initLibNvInferPlugins(void *a, const char *b) { return 1; }
void *getBuilderPluginRegistry(int a) { return 0; }
void *getPluginRegistry(void) { return 0; }
void *getLogger(void) { return 0; }
int getInferLibVersion(void) { return 110400; }
"""


@cache
def real_bindings() -> Any:
    """The bindings of TensorRT 11.4 as they are; skips the test where no C compiler makes the stubs."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("the stubs for TensorRT's bindings need a C compiler", allow_module_level=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stub.c")
        source.write_text(_STUB)
        for name in _LIBRARIES:
            library = Path(folder, f"{name}.so.11")
            subprocess.run(
                [compiler, "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True
            )
            ctypes.CDLL(str(library))  # the loader then knows it by its name, and looks for no file
        return importlib.import_module("tensorrt_bindings")


@cache
def standin() -> Any:
    """`import tensorrt` gives this module from now on, in this process."""
    from . import tensorrt_fakes as fakes

    bindings = real_bindings()
    module = ModuleType("tensorrt")
    module.__spec__ = ModuleSpec("tensorrt", None)
    names = [name for name in dir(bindings) if not name.startswith("_")]
    vars(module).update({name: getattr(bindings, name) for name in names}, __version__=bindings.__version__)
    vars(module).update(
        {
            name: getattr(fakes, name)
            for name in ("Builder", "DimsExprs", "OnnxParser", "Runtime", "get_plugin_registry")
        }
    )
    sys.modules["tensorrt"] = module
    return module
