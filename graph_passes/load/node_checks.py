"""Checks nodes against ONNX's own definitions of their operators: a missing input, type or attribute
otherwise fails deep in a library, each time with another error.

Attributes that a definition does not know are not checked: TensorRT and ONNX Runtime decide on these.
"""

import re
from collections.abc import Iterable, Mapping

import onnx
from onnx.defs import OpSchema

from trt_nvfp4.common.nested_graphs import bodies
from trt_nvfp4.plugins.ops import DOMAIN as OURS
from trt_nvfp4.plugins.ops import OPS

_Attribute = onnx.AttributeProto
# Far beyond every operator set; ONNX's own look-up takes 32 bits.
_NEWEST_VERSION = 1 << 20
# The most dimensions of a tensor that libraries take.
_MOST_DIMENSIONS = 64
# The field that holds an attribute's value, by its type.
_FIELDS = {
    _Attribute.FLOAT: "f",
    _Attribute.INT: "i",
    _Attribute.STRING: "s",
    _Attribute.TENSOR: "t",
    _Attribute.GRAPH: "g",
    _Attribute.SPARSE_TENSOR: "sparse_tensor",
    _Attribute.TYPE_PROTO: "tp",
}


def check_nodes(proto: onnx.ModelProto) -> None:
    """Checks every node of `proto`, those in bodies and functions too.

    Raises:
        ValueError: an input, output or attribute is missing, there are too many, or an attribute has no value of the
            type that its operator takes. The message names the node.
    """
    for entry in proto.opset_import:
        if not 1 <= entry.version <= _NEWEST_VERSION:
            raise ValueError(f"version {entry.version} of the operators of domain '{entry.domain}' does not exist")
    _check(proto.graph.node, _versions(proto.opset_import))
    for function in proto.functions:
        _check(function.node, _versions(function.opset_import), in_function=True)


def _versions(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    return {"" if entry.domain == "ai.onnx" else entry.domain: entry.version for entry in imports}


def _check(nodes: Iterable[onnx.NodeProto], versions: Mapping[str, int], in_function: bool = False) -> None:
    for node in nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        for attribute in node.attribute:
            if not attribute.ref_attr_name:
                _check_value(node, attribute)
            elif not in_function:
                raise ValueError(
                    f"{_named(node)}: attribute '{attribute.name}' is one of a function, and this is in none"
                )
        version = versions.get(domain, 0)
        if domain == OURS:
            _check_plugin(node)
        elif onnx.defs.has(node.op_type, max_inclusive_version=version, domain=domain):
            schema = onnx.defs.get_schema(node.op_type, max_inclusive_version=version, domain=domain)
            _check_arity(node, schema)
            _check_attributes(node, schema)
            check_counts(node)
            if node.op_type == "Einsum" and not domain:
                _check_einsum(node)
        for body in bodies(node):
            _check(body.node, versions, in_function)


def _check_plugin(node: onnx.NodeProto) -> None:
    """Checks an op of ours, which models of other versions may have otherwise."""
    try:
        if node.op_type not in OPS:
            raise ValueError(
                f"unknown operator '{node.op_type}' (node '{node.name}') of domain '{OURS}'; its operators are "
                f"{', '.join(OPS)}"
            )
        definition = OPS[node.op_type]
        schema = definition.schema()
        _check_arity(node, schema)
        _check_attributes(node, schema)
        if unknown := [each.name for each in node.attribute if each.name not in definition.attributes]:
            raise ValueError(f"{_named(node)}: it has no attribute '{unknown[0]}'")
    except ValueError as error:
        raise ValueError(
            f"{error}; if another version made the model, rewrite the original again with this one"
        ) from None


def _check_value(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    """Checks an attribute by itself: a type, and the value of that type."""
    field = _FIELDS.get(attribute.type)
    repeated = attribute.type in (
        *(_Attribute.FLOATS, _Attribute.INTS, _Attribute.STRINGS, _Attribute.TENSORS, _Attribute.GRAPHS),
        *(_Attribute.SPARSE_TENSORS, _Attribute.TYPE_PROTOS),
    )
    # Zero, and an empty text, may have been left out by writers of protobuf 3.
    has_default = field in ("f", "i", "s")
    if not repeated and (field is None or not (has_default or attribute.HasField(field))):
        raise ValueError(f"{_named(node)}: attribute '{attribute.name}' has no value of a known type")
    if attribute.type in (_Attribute.STRING, _Attribute.STRINGS):
        for text in (attribute.s, *attribute.strings):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{_named(node)}: attribute '{attribute.name}' is not UTF-8 text: {error}") from error


def _check_arity(node: onnx.NodeProto, schema: OpSchema) -> None:
    for what, names, least, most in (
        ("input", node.input, schema.min_input, schema.max_input),
        ("output", node.output, schema.min_output, schema.max_output),
    ):
        if not least <= len(names) <= most:
            expected = f"{least}" if least == most else f"{least} to {most}"
            raise ValueError(f"{_named(node)}: has {len(names)} {what}s, expected {expected}")
    for number, (name, parameter) in enumerate(zip(node.input, schema.inputs, strict=False)):
        if not name and parameter.option == OpSchema.FormalParameterOption.Single:
            raise ValueError(f"{_named(node)}: input {number} ({parameter.name}) is missing")


def _check_attributes(node: onnx.NodeProto, schema: OpSchema) -> None:
    found = {attribute.name: attribute for attribute in node.attribute}
    if len(found) < len(node.attribute):
        raise ValueError(f"{_named(node)}: has an attribute twice")
    if schema.name == "Constant" and schema.domain == "":
        if len(found) != 1:
            raise ValueError(f"{_named(node)}: has {len(found)} attributes, expected one, its value")
        if not found.keys() <= schema.attributes.keys():
            raise ValueError(f"{_named(node)}: attribute {next(iter(found))!r} is not a value of a constant")
    for name, expected in schema.attributes.items():
        attribute = found.get(name)
        if attribute is None:
            if expected.required:
                raise ValueError(f"{_named(node)}: attribute '{name}' is missing")
        # The types of definitions are called as those of attributes; their stubs do not say so.
        elif (kind := _Attribute.AttributeType.Name(attribute.type)) != (
            wanted := str(expected.type).rpartition(".")[2]
        ):
            raise ValueError(f"{_named(node)}: attribute '{name}' is {kind}, expected {wanted}")


def check_counts(node: onnx.NodeProto) -> None:
    """Checks what ONNX's shape inference does not, and ends the process over (measured with onnx 1.23).

    Raises ValueError.
    """
    if node.domain not in ("", "ai.onnx"):
        return
    # What a function's caller gives has no value before the function is inlined.
    own = [attribute for attribute in node.attribute if not attribute.ref_attr_name]
    counts = {attribute.name: attribute.i for attribute in own if attribute.type == _Attribute.INT}
    parts = counts.get("num_outputs")
    if node.op_type == "Split" and parts is not None and parts != len(node.output):
        raise ValueError(f"{_named(node)}: num_outputs is {parts}, but it has {len(node.output)}")
    if node.op_type == "GatherND" and not 0 <= (batches := counts.get("batch_dims", 0)) <= _MOST_DIMENSIONS:
        raise ValueError(f"{_named(node)}: batch_dims is {batches}, expected 0 to {_MOST_DIMENSIONS}")


def _check_einsum(node: onnx.NodeProto) -> None:
    """Whether its equation has a term of letters for each operand, and a result of letters in them."""
    equation = next((each.s.decode() for each in node.attribute if each.name == "equation"), "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    letters = set(terms.replace("...", "")) - {","}
    wrong = any(not re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", term) for term in (*terms.split(","), result))
    if wrong or len(terms.split(",")) != len(node.input) or (arrow and not set(result.replace("...", "")) <= letters):
        raise ValueError(
            f"{_named(node)}: its equation '{equation}' does not fit its {len(node.input)} inputs; expected a term of "
            "letters for each, such as bk,kn->bn"
        )


def _named(node: onnx.NodeProto) -> str:
    return f"node '{node.name}' ({node.op_type})" if node.name else f"node {node.op_type} of {list(node.output)}"
