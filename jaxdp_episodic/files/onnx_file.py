"""ONNX files: a network of any framework, cut off after one of its values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxdp_episodic import _validation
from jaxdp_episodic.files.archive import read_bounded
from jaxdp_episodic.files.optional import require

_MAX_BYTES = 2**30  # of a file; Protocol Buffers messages are limited to 2 GiB


class OnnxNetwork(NamedTuple):
    """A network with one output, including its weights."""

    content: bytes  # an ONNX model without the parts that the output does not need
    output: str  # name of the output
    sha256: str  # of the whole file


def require_onnx(module: str) -> Any:
    """Returns ``onnx`` or ``onnxruntime``; see `require`."""
    return require(module, purpose="features of kind 'onnx'", extra="onnx")


def read_onnx(path: Path, output: str | None = None) -> OnnxNetwork:
    """Returns the network in a file of unknown origin."""
    onnx = require_onnx("onnx")
    try:
        data = read_bounded(path, _MAX_BYTES)
        model = onnx.load_model_from_string(data)
    except OSError:
        raise
    except Exception as error:  # a DecodeError, whose module varies
        raise ValueError(f"{path} must be an ONNX file: {error}") from None
    if not model.graph.node or not model.graph.output:
        raise ValueError(f"{path} must be an ONNX file with a network, but has none")
    tensors = (m for m in _within(model) if isinstance(m, onnx.TensorProto))
    for tensor in tensors:
        # The checksum would not cover another file, whose path may lead anywhere.
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise ValueError(
                f"{path} must contain its weights, but {tensor.name[:80]!r} is in "
                "another file; save it again without external data"
            )
    name = model.graph.output[0].name if output is None else output
    _cut(onnx, model.graph, name, path)
    return OnnxNetwork(
        model.SerializeToString(), name, hashlib.sha256(data).hexdigest()
    )


def _cut(onnx: Any, graph: Any, output: str, path: Path) -> None:
    """Makes a value the only output, and removes everything it does not need."""
    made = [name for node in graph.node for name in node.output if name]
    if output not in made:
        hint = _validation.nearest(output, made) or f"; the last are {made[-3:]}"
        raise ValueError(f"output must be a value in {path}, got {output!r}{hint}")
    needed = {output}
    for place in reversed(range(len(graph.node))):  # nodes come after their inputs
        node = graph.node[place]
        if needed.isdisjoint(node.output):
            del graph.node[place]
        else:
            for inside in _within(node):  # a node may hold graphs
                if isinstance(inside, onnx.NodeProto):
                    needed.update(inside.input)
                elif isinstance(inside, onnx.GraphProto):
                    needed.update(value.name for value in inside.output)
    for values in (graph.input, graph.initializer, graph.value_info):
        for place in reversed(range(len(values))):
            if values[place].name not in needed:
                del values[place]
    del graph.output[:]
    graph.output.append(onnx.ValueInfoProto(name=output))


def _within(message: Any) -> Iterator[Any]:
    """Yields a message of Protocol Buffers, and all messages in it."""
    found = [message]
    while found:
        message = found.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                found += value if hasattr(value, "__len__") else [value]
