"""Every TensorRT name, member, method and signature that our files use, held against the real bindings.

Names that hang on `trt` are found in the source. Methods are called on objects, whose classes no source tells: CLASSES
says which variable of which file is which class, and a variable that is missing there is one of our own.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .tensorrt_standin import real_bindings, standin

ROOT = Path(__file__).parent.parent
CLASSES: Mapping[str, Mapping[str, str]] = {
    "plugins/tensorrt_plugin.py": {
        "field": "PluginField", "found": "PluginTensorDesc", "tensor": "DynamicPluginTensorDesc",
    },
    "plugins/paged_attention_plugin.py": {},
    "plugins/stateful_sampling_plugin.py": {},
    "plugins/plugin_registry.py": {"registry": "IPluginRegistry", "held": "IPluginCreatorV3One"},
    "builder/trt_builder.py": {
        "self._builder": "Builder", "config": "IBuilderConfig", "plan": "IHostMemory", "engine": "ICudaEngine",
    },
    "builder/trt_config.py": {
        "builder": "Builder", "config": "IBuilderConfig", "network": "INetworkDefinition",
        "profile": "IOptimizationProfile", "tensor": "ITensor",
    },
    "builder/trt_journal.py": {},
    "builder/trt_network.py": {
        "builder": "Builder", "network": "INetworkDefinition", "parser": "OnnxParser", "error": "ParserError",
        "placeholder": "ILayer", "layer": "IDistCollectiveLayer",
    },
}  # fmt: skip
RTX_CLASSES: Mapping[str, str] = {
    "builder": "Builder", "network": "INetworkDefinition", "parser": "OnnxParser", "config": "IBuilderConfig",
    "shapes": "IOptimizationProfile", "plan": "IHostMemory", "layer": "ILayer",
}  # fmt: skip
# A description that holds another: attributes of these are looked for one level down as well.
HELD = {"DynamicPluginTensorDesc": "PluginTensorDesc"}
# The bindings' own text of this one is that of another method (pybind reports the wrong self as well).
WRONG_TEXT = {"get_aliased_input": 1}
OPTIONAL = {"destroy"}  # of IPluginV3: the default does nothing, and we have nothing to give back


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def dotted(node: ast.expr) -> str:
    """ "self._builder" of such an expression, "" of any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def library_names(module: ast.Module) -> set[str]:
    """Every `trt.X` and `trt.X.Y` in a file."""
    names = {dotted(node) for node in ast.walk(module) if isinstance(node, ast.Attribute)}
    return {name.removeprefix("trt.") for name in names if name.startswith("trt.")}


def resolve(library: Any, name: str) -> Any:
    found = library
    for part in name.split("."):
        assert hasattr(found, part), f"{library.__name__} has no {name}"
        found = getattr(found, part)
    return found


def signatures(function: Any) -> list[list[tuple[str, bool]]]:
    """Overloads by the bindings' text: each a list of (parameter, has a default), self left out."""
    text = function.__doc__ or ""
    heads = [line for line in text.splitlines() if re.match(r"(\d+\. )?\w+\(.*\) -> ", line)]
    heads = [head for head in heads if "(*args, **kwargs)" not in head]
    assert heads, f"no signature in {text[:80]!r}"
    return [[(name, default) for name, default in _parameters(head) if name != "self"] for head in heads]


def _parameters(head: str) -> Iterator[tuple[str, bool]]:
    inner = head[head.index("(") + 1 : head.rindex(") -> ")]
    depth, part = 0, ""
    for letter in inner + ",":
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and depth == 0:
            if part.strip():
                yield part.split(":")[0].strip(), "=" in part.split(":", 1)[-1]
            part = ""
        else:
            part += letter


def takes(function: Any, count: int) -> bool:
    return any(
        sum(not default for _, default in overload) <= count <= len(overload) for overload in signatures(function)
    )


def uses(module: ast.Module, classes: Mapping[str, str]) -> Iterator[tuple[str, str, str, int | None]]:
    """(class, attribute, how it is used, arguments of a call) of everything done to the variables of `classes`."""
    called = {
        id(node.func): len(node.args) + len(node.keywords) for node in ast.walk(module) if isinstance(node, ast.Call)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and (kind := classes.get(dotted(node.value))):
            how = "set" if isinstance(node.ctx, ast.Store) else "call" if id(node) in called else "get"
            yield kind, node.attr, how, called.get(id(node))


def check_use(library: Any, kind: str, attribute: str, how: str, count: int | None) -> None:
    kinds = [kind, *([HELD[kind]] if kind in HELD else [])]
    owner = next((getattr(library, name) for name in kinds if hasattr(getattr(library, name), attribute)), None)
    assert owner is not None, f"{kind} has no {attribute}"
    found = inspect.getattr_static(owner, attribute)
    is_property = isinstance(found, property)
    if how == "set":
        assert is_property and found.fset is not None, f"{kind}.{attribute} can't be set"  # noqa: PT018
    if how == "call":
        assert not is_property, f"{kind}.{attribute} is no method"
        assert count is not None
        assert takes(getattr(owner, attribute), count), f"{kind}.{attribute} does not take {count} arguments"
    # `map(network.get_layer, …)` passes a method on: it is got, not called


@pytest.mark.parametrize("path", CLASSES)
def test_every_library_name_exists(path: str) -> None:
    names = library_names(tree(path))
    for name in sorted(names):
        resolve(real_bindings(), name)
    imports = "import tensorrt as trt" in (ROOT / path).read_text()
    assert bool(names) == imports


@pytest.mark.parametrize("path", CLASSES)
def test_every_method_and_property_exists_with_our_arguments(path: str) -> None:
    met = set()
    for kind, attribute, how, count in uses(tree(path), CLASSES[path]):
        check_use(real_bindings(), kind, attribute, how, count)
        met.add(kind)
    assert met == set(CLASSES[path].values()), "CLASSES tells of a class that the file no longer uses"


@pytest.mark.parametrize("path", CLASSES)
def test_constructors_take_our_arguments(path: str) -> None:
    """`trt.X(…)`; calls of a base's __init__ pass the object itself besides."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call) or not dotted(node.func).startswith("trt."):
            continue
        if dotted(node.func).startswith("trt.__version__."):
            continue  # a str
        made = resolve(real_bindings(), dotted(node.func).removeprefix("trt."))
        if inspect.isclass(made):
            assert takes(made.__init__, len(node.args) + len(node.keywords)), dotted(node.func)
        elif dotted(node.func).endswith(".__init__"):
            assert takes(made, len(node.args) - 1), dotted(node.func)
        else:
            assert takes(made, len(node.args) + len(node.keywords)), dotted(node.func)


def test_every_file_that_imports_tensorrt_is_checked() -> None:
    found = {
        f"{path.parent.name}/{path.name}"
        for room in ("engines", "plugins", "builder", "runtime")
        for path in (ROOT / room).glob("*.py")
        if re.search(r"^\s*import tensorrt( |$)", path.read_text(), re.MULTILINE)
    }
    assert found <= set(CLASSES)


def ours_and_bases() -> list[tuple[type, Any]]:
    standin()
    from ostinato.builder.trt_journal import Journal, PhaseProgress
    from ostinato.plugins.paged_attention_plugin import PagedAttentionPlugin
    from ostinato.plugins.stateful_sampling_plugin import StatefulSamplingPlugin
    from ostinato.plugins.tensorrt_plugin import OperatorCreator

    trt = real_bindings()
    plugin = (
        trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime,
    )  # fmt: skip
    return [
        *((ours, base) for ours in (PagedAttentionPlugin, StatefulSamplingPlugin) for base in plugin),
        (OperatorCreator, trt.IPluginCreatorV3One),
        (PhaseProgress, trt.IProgressMonitor),
        (Journal, trt.ILogger),
    ]


def test_every_base_method_is_overridden_with_the_same_arguments() -> None:
    checked = []
    for ours, base in ours_and_bases():
        assert issubclass(ours, base)
        for name, method in vars(base).items():
            if name.startswith("_") or not callable(method) or isinstance(method, type) or name in OPTIONAL:
                continue
            if name in getattr(base, "__members__", {}) or name.isupper():
                continue
            override = getattr(ours, name)
            assert inspect.isfunction(override), f"{ours.__name__} leaves {name} to {base.__name__}"
            count = len(inspect.signature(override).parameters) - 1
            wanted = WRONG_TEXT.get(name) or len(signatures(method)[0])
            assert count == wanted, f"{ours.__name__}.{name} takes {count} arguments, TensorRT gives {wanted}"
            checked.append(name)
    assert set(checked) >= {
        *("clone", "get_capability_interface", "configure_plugin", "get_output_data_types", "get_output_shapes"),
        *("get_valid_tactics", "get_workspace_size", "supports_format_combination", "get_aliased_input"),
        *("attach_to_context", "enqueue", "get_fields_to_serialize", "on_shape_change", "set_tactic"),
        *("create_plugin", "phase_start", "step_complete", "phase_finish", "log"),
    }


def test_every_attribute_that_tensorrt_reads_is_set() -> None:
    """Bindings ask for what their text calls attributes (`:ivar`); one that is not set is an error deep in a build."""
    standin()
    from ostinato.plugins.launch_table import LaunchTable
    from ostinato.plugins.stateful_sampling_plugin import StatefulSamplingPlugin
    from ostinato.plugins.tensorrt_plugin import OperatorCreator

    class Nobody:
        def prepare(self, kernels: Any) -> None: ...

        def launch(self, kernel: str, grid: Any, pointers: Any, stream: int) -> None: ...

    plugin = StatefulSamplingPlugin({"logits_dtype": "float32"}, LaunchTable({}), Nobody())
    for made, bases in (
        (plugin, ("IPluginV3OneCore", "IPluginV3OneBuild")),
        (OperatorCreator(StatefulSamplingPlugin, Nobody()), ("IPluginCreatorV3One",)),
    ):
        for base in bases:
            named = re.findall(r":ivar (\w+):", getattr(real_bindings(), base).__doc__)
            assert named
            for name in named:
                assert getattr(made, name) is not None, f"{type(made).__name__} has no {name}"


def test_the_members_that_stand_for_our_dtypes_have_their_width() -> None:
    standin()
    from ostinato.engines.program import DTYPE_BYTES
    from ostinato.plugins.tensorrt_plugin import TYPES

    assert {name: kind.itemsize for name, kind in TYPES.items()} == {name: DTYPE_BYTES[name] for name in TYPES}


# -- TensorRT-RTX, whose library is here


def test_the_rtx_builder_uses_what_its_library_has() -> None:
    library = pytest.importorskip("tensorrt_rtx")
    module = tree("builder/rtx_builder.py")
    names = library_names(module)
    assert len(names) > 10
    for name in sorted(names):
        resolve(library, name)
    found = list(uses(module, RTX_CLASSES))
    assert {kind for kind, *_ in found} == set(RTX_CLASSES.values())
    for use in found:
        check_use(library, *use)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("config.set_flags(trt.BuilderFlag.REFIT)", "IBuilderConfig has no set_flags"),
        ("config.set_flag(1, 2)", "does not take 2 arguments"),
        ("config.num_optimization_profiles = 3", "can't be set"),
        ("config.flags()", "is no method"),
    ],
)
def test_the_check_can_fail(source: str, complaint: str) -> None:
    (use,) = uses(ast.parse(source), {"config": "IBuilderConfig"})
    with pytest.raises(AssertionError, match=complaint):
        check_use(real_bindings(), *use)


def test_a_name_that_the_bindings_lack_is_found() -> None:
    assert library_names(ast.parse("trt.BuilderFlag.FP16")) == {"BuilderFlag", "BuilderFlag.FP16"}
    with pytest.raises(AssertionError, match=r"no BuilderFlag\.FP16"):
        resolve(real_bindings(), "BuilderFlag.FP16")
