"""The part of the verifier that follows values through a body: collectives, joined parameters, KV states.

Routed rows: `rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from moec.blocks import SCALES
from moec.ir.ops.scales import SCALES_AT
from moec.ir.params import Param, State
from moec.ir.program import Body, Program, Type, is_op, op_of, type_of
from moec.layout import Replicate, Shard

Faults = Iterator[str]


def returned_type(body: Body) -> Type:
    """Type of the value a body returns."""
    output = next(node for node in body.graph.nodes if node.op == "output")
    (value,) = output.args
    assert isinstance(value, fx.Node)
    return type_of(value)


def check_collectives(program: Program, body: Body) -> Faults:
    """Groups exist, and each start has one wait."""
    groups = program.mesh.groups()
    for node in body.graph.nodes:
        if not is_op(node):
            continue
        name, group = op_of(node).name, node.kwargs.get("group")
        if "comm" in op_of(node).effects and node.kwargs.get("how", "move") != "keep" and group not in groups:
            yield f"{name} runs on {group}, which this mesh does not have"
        if name == "all_to_all.start":
            waits = [user for user in node.users if is_op(user) and op_of(user).name == "all_to_all.wait"]
            if len(waits) != 1 or len(node.users) != 1:
                yield f"all_to_all.start at {node.meta['loc']} has {len(waits)} waits and {len(node.users)} readers"


#: Operations that read gate and up from one parameter, which operand that is, and the dim along which it joins them.
JOINED = {
    "gate_up": (1, 0),
    "grouped_gate_up": (2, 1),
    **dict.fromkeys(("gathered_gate_up", "paired_experts", "cached_experts"), (3, 1)),
}


def check_joined(program: Program, body: Body) -> Faults:
    """A parameter of several parts is read as these, and only there; scales are of the weights that they scale."""
    for node in filter(is_op, body.graph.nodes):
        name = op_of(node).name
        read = [body.params.get(str(value.target)) for value in node.args if isinstance(value, fx.Node)]
        for weights, scales in reversed([pair for pair in SCALES_AT.get(name, ()) if pair[1] < len(read)]):
            yield from _scale_fault(name, read[weights], read.pop(scales))
        if name in JOINED:
            index, dim = JOINED[name]
            param = read.pop(index)
            if param is None or len(param.parts) != 2 or param.dim != dim:
                yield f"{name} reads gate and up from a parameter that does not join the two along dim {dim}"
        elif name == "merged_linear":
            yield from _merged_fault(read.pop(), node.kwargs["sizes"])
        for param in read:
            if param is not None and len(param.parts) > 1:
                yield f"{name} reads {' and '.join(param.parts)} as one parameter"


def _merged_fault(param: Param | None, sizes: Any) -> Faults:
    """`sizes`: on one rank, which has the same share of each part."""
    wanted = param.sizes if param is not None and param.dim == 0 else ()
    if [size * sum(wanted) for size in sizes] != [part * sum(sizes) for part in wanted]:
        yield f"merged_linear gives {sizes}, the parts of what it reads are {wanted}"


def check_shared(program: Program, body: Body) -> Faults:
    """The experts that a router adds to every row's choices are those that the stacks of experts end with."""
    added = {int(str(n.kwargs.get("shared", 0))) for n in body.graph.nodes if is_op(n) and op_of(n).name == "route"}
    stacks = [param.shared for param in body.params.values() if len(param.shape) == 3]
    held = {shared.count if shared is not None else 0 for shared in stacks}
    if added and len(added | held) > 1:
        counts = " or ".join(map(str, sorted(held)))
        yield f"the router adds {' or '.join(map(str, sorted(added)))} shared experts, the parameters have {counts}"


def _scale_fault(name: str, weights: Param | None, scales: Param | None) -> Faults:
    wanted = tuple(part + SCALES for part in weights.names) if weights is not None else None
    if scales is None or weights is None or (scales.names, scales.dim) != (wanted, weights.dim):
        yield f"{name} scales weights by what are no scales of theirs"


# --- KV states ---------------------------------------------------------------------------------------------------


def check_states(program: Program, body: Body) -> Faults:
    """KV memory is written once for each row, chunks in their order, and cut as the heads that are written to it."""
    writers = [node for node in body.graph.nodes if is_op(node) and "kv" in op_of(node).effects]
    chunks = [node.kwargs.get("chunk", (0, 1)) for node in writers]
    if chunks != ([(index, len(writers)) for index in range(max(1, len(writers)))] if body.states else []):
        yield f"{len(writers)} operations write the states {sorted(body.states)}, as chunks {chunks}"
        return
    for node in writers if program.is_typed else ():
        written = {"k": 1, "v": 2} if op_of(node).name == "attention" else {"latent": 2, "rope": 3}
        if set(written) != set(body.states):
            yield f"{op_of(node).name} writes {sorted(written)}, the body has {sorted(body.states)}"
            continue
        for name, index in written.items():
            value = node.args[index]
            assert isinstance(value, fx.Node)
            yield from _state_fault(program, name, body.states[name], type_of(value))


def _state_fault(program: Program, name: str, state: State, value: Type) -> Faults:
    place, held = value.layout.on("tp"), state.layout.on("tp")
    wanted = Shard(0, place.copies) if isinstance(place, Shard) and place.dim == 1 else Replicate()
    if held != wanted:
        yield f"state {name} lies {held} on tp, what is written to it {place}"
    elif (state.dtype, state.local_shape(program.mesh)) != (value.dtype, value.shape[1:]):
        kept = f"{state.dtype}{list(state.local_shape(program.mesh))}"
        yield f"state {name} keeps {kept} per token, {value.dtype}{list(value.shape[1:])} is written"
