"""Makes our operators known to TensorRT's plugin registry, which a whole process shares (offline; once at start)."""

from __future__ import annotations

from typing import Any

from ostinato.engines.errors import DeviceError

from .launcher import Launcher
from .paged_attention_plugin import PagedAttentionPlugin
from .stateful_sampling_plugin import StatefulSamplingPlugin
from .tensorrt_plugin import NAMESPACE, PLUGIN_VERSION, OperatorCreator

PLUGINS = (PagedAttentionPlugin, StatefulSamplingPlugin)


def register_plugins(registry: Any, launcher: Launcher) -> tuple[OperatorCreator, ...]:
    """Register one creator an operator, whose plugins launch through `launcher`.

    Creators of an earlier call give way, so each bundle's engines are made with its own kernels; plugins made before
    keep theirs. The caller must hold the creators while it parses or deserializes.
    Raises DeviceError if the registry refuses.
    """
    ours = {plugin.schema.name for plugin in PLUGINS}
    for held in list(registry.all_creators):
        if held.plugin_namespace == NAMESPACE and held.name in ours:
            registry.deregister_creator(held)
    creators = tuple(OperatorCreator(plugin, launcher) for plugin in PLUGINS)
    for creator in creators:
        if not registry.register_creator(creator, NAMESPACE):
            raise DeviceError(
                f"TensorRT's registry refuses {NAMESPACE}::{creator.name} version {PLUGIN_VERSION}: another library in "
                "this process has taken the name; start a process without it"
            )
    return creators
