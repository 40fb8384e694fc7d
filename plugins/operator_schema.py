"""What an operator is called and takes: the one description that body, exporter and tests share (offline)."""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "ostinato"
VERSION = 1
STANDARD_OPSET = 23  # of the standard operators that a body is written in


@dataclass(frozen=True)
class Attribute:
    """One attribute; `default` None means that a node must give it."""

    name: str
    kind: type[int] | type[float]
    default: int | float | None = None


@dataclass(frozen=True)
class OperatorSchema:
    """An operator of the domain `ostinato`, version 1; inputs and outputs in node order, none of them optional."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[Attribute, ...] = ()

    def signature(self) -> str:
        """The head of the body in ONNX's text syntax: opset import, domain, name, attributes, inputs, outputs."""
        attributes = ", ".join(
            f"{a.name}: {a.kind.__name__}" + ("" if a.default is None else f" = {a.default}") for a in self.attributes
        )
        return (
            f'<opset_import: ["" : {STANDARD_OPSET}], domain: "{DOMAIN}">\n'
            f"{self.name} {f'<{attributes}> ' if attributes else ''}"
            f"({', '.join(self.inputs)}) => ({', '.join(self.outputs)})\n"
        )
