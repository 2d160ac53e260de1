"""Writes a spec in the style of the shipped ones."""

from __future__ import annotations

import textwrap

from gradgen.identifiers import bad_identifier
from gradgen.infer_blocks import BufferEntry, Entry, Stack, buffers, outside_entries, stacks
from gradgen.infer_dims import Dims, dim_name
from gradgen.infer_facts import EXPERT, Facts, InferError, Parameter, Switch
from gradgen.infer_ids import snake
from gradgen.infer_indices import bounded_by
from gradgen.infer_order import backward, open_at_once
from gradgen.infer_stacks import structure
from gradgen.infer_yaml import STRATEGIES, Row, aligned, flow, listed, name_text, printable, rows, scalar, yes

WIDTH = 118
MIN_GROUP = 4  # weights that are worth a group
USUAL_BUFFERS = 2  # what managers have by default


class Writer:
    """Decides what the spec says of each weight, and collects what a reader should know."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.known = {p.name: p for p in facts.parameters}
        self.found = structure(facts.parameters)
        self.blocks = stacks(facts, self.found)
        self.outside = outside_entries(facts, self.found, [block.id for block in self.blocks])
        self.dims = Dims(facts)
        self.notes = list(facts.notes)
        self.flags: dict[str, Switch] = {}
        self.absent: list[str] = []
        self.uses: dict[str, str] = {}  # the group of a block
        self.ids = {entry.parameter.name: entry.id for entry in self.outside if not entry.experts}
        self.free_buffers, self.block_buffers, left = buffers(facts, self.blocks, self.outside)
        if left:
            self.notes.append(f"buffers that follow no rule are left out: {listed(left)}")

    def text(self) -> str:
        weights = [self._weight(entry, None) for entry in self.outside]
        bodies = [[self._weight(entry, block) for entry in block.entries] for block in self.blocks]
        shared = self._groups(bodies)
        heads = [self._block_head(block) for block in self.blocks]
        buffers_outside = [self._buffer(entry) for entry in self.free_buffers]
        extras = [[self._buffer(entry) for entry in self.block_buffers.get(b.id, ())] for b in self.blocks]
        order = self._backward()
        out = ["gradgen: 1", f"model: {self.facts.model}", f"summary: {scalar(self.facts.summary)}", ""]
        declared = self.dims.declared()
        if declared:
            out += ["dims:", *aligned(declared, 2), ""]
        if self.flags:
            entries = {
                name: {"hf": flag.key, "default": yes(flag.default)} for name, flag in self.flags.items()
            }
            out += ["flags:", *aligned(entries, 2), ""]
        values = {
            **self.dims.values(),
            **{n: yes(f.value) for n, f in self.flags.items() if f.value != f.default},
        }
        if declared and self.facts.preset:
            out += ["presets:", f"  {self.facts.preset}: {flow(values)}", ""]
        if weights:
            out += ["weights:", *rows(weights, 2), ""]
        if buffers_outside:
            out += ["buffers:", *rows(buffers_outside, 2), ""]
        if self.blocks:
            if shared:
                out += ["groups:"]
                for id, group in shared.items():
                    out += [f"  {id}:", *rows(group, 4)]
                out.append("")
            out.append("blocks:")
            for head, body, extra in zip(heads, bodies, extras, strict=True):
                out += [*head, *(["    weights:", *rows(body, 6)] if body else [])]
                out += ["    buffers:", *rows(extra, 6)] if extra else []
            out.append("")
        out += [*order, "", STRATEGIES.rstrip()]
        return "\n".join([*self._comments(), *out]) + "\n"

    def _groups(self, bodies: list[list[Row]]) -> dict[str, list[Row]]:
        """What all kinds of a stack begin with is said once, in a group that each uses; so the order of weights stays."""
        out: dict[str, list[Row]] = {}
        for prefix in dict.fromkeys(block.prefix for block in self.blocks):
            mine = [k for k, block in enumerate(self.blocks) if block.prefix == prefix]
            run = 0
            while all(len(bodies[k]) > run and bodies[k][run] == bodies[mine[0]][run] for k in mine):
                run += 1
            if len(mine) < 2 or run < MIN_GROUP:
                continue
            common = bodies[mine[0]][:run]
            words = {row[1]["name"].split(".")[0] for row in common}
            id = snake(words.pop()) if len(words) == 1 else "common"
            while id in out or bad_identifier(id):
                id += "_group"
            out[id] = common
            for k in mine:
                del bodies[k][:run]
                self.uses[self.blocks[k].id] = id
        return out

    def _comments(self) -> list[str]:
        """The findings, as comments at the head of the file."""
        if self.dims.unexplained:
            names = list(self.dims.unexplained)
            self.notes.append(
                f"sizes that depend on the configuration in a way that was not found, so they are numbers here: "
                f"{listed(names)}"
            )
        wide = open_at_once(self.facts, self.blocks)
        if wide > USUAL_BUFFERS:
            self.notes.append(
                f"gradients of {wide} blocks are unfinished at once, because some weights are used in several: sharded "
                f"strategies need block_buffers={wide}"
            )
        if self.absent and self.facts.backward is not None:
            self.notes.append(
                f"got no gradient from {self.facts.backward.inputs}, so may_be_absent: {listed(self.absent)}; drop it where "
                "your training reaches them"
            )
        lines = []
        for note in self.notes:
            wrapped = textwrap.wrap(
                printable(note), WIDTH - 4, break_long_words=False, break_on_hyphens=False
            )
            lines += [f"# {'- ' if n == 0 else '  '}{line}" for n, line in enumerate(wrapped)]
        return (
            ["# Written by `gradgen infer`. What it chose, and what it could not know:", *lines]
            if lines
            else []
        )

    def _block_head(self, block: Stack) -> list[str]:
        count = self.dims.count(block.prefix, block.count)
        lines = [f"  {block.id}:", f"    count: {count}", f"    name: {name_text(block.name)}"]
        if block.at:
            lines.append(f"    at: {self._at(block)}")
        if block.id in self.uses:
            lines.append(f"    use: [{self.uses[block.id]}]")
        return lines

    def _at(self, block: Stack) -> str:
        if isinstance(block.at, list):
            return f"[{', '.join(map(str, block.at))}]"
        for text, dim in bounded_by(block.at, {n: self.facts.values[k] for n, k in self.dims.names.items()}):
            if self._holds(text, dim, block):
                self.dims.used.setdefault(dim)
                return text
        return block.at

    def _holds(self, text: str, dim: str, block: Stack) -> bool:
        """Whether moving the dim moves the blocks with these weights."""
        key = self.dims.names[dim]
        names = {entry.relative for entry in block.entries if not entry.when and not entry.switch}
        for variant in self.facts.variants:
            if variant.keys == (key,):
                have = {
                    int(rest.split(".")[0])
                    for rest in (
                        n.removeprefix(f"{block.prefix}.")
                        for n in variant.shapes
                        if n.startswith(f"{block.prefix}.")
                    )
                    if rest.split(".")[0].isdecimal()
                }
                limit = variant.values.get(key, 0)
                here = {
                    i for i in have if all(f"{block.prefix}.{i}.{name}" in variant.shapes for name in names)
                }
                wanted = {i for i in have if (i < limit if "<" in text else i >= limit)}
                return here == wanted and limit != self.facts.values[key]
        return False

    def _backward(self) -> list[str]:
        items = [
            (f"{{block: {item[0]}}}" if len(item) == 1 else f"{{block: [{', '.join(item)}]}}")
            if many
            else str(item)
            for item, many in backward(self.facts, self.outside, self.blocks)
        ]
        line = f"backward: [{', '.join(items)}]"
        if len(line) <= WIDTH:
            return [line]
        return ["backward:", *(f"  - {item}" for item in items)]

    def _weight(self, entry: Entry, block: Stack | None) -> Row:
        """Id, fields and comment of one weight."""
        parameter = entry.parameter
        fields = {
            "shape": self._shape(self.known.get(parameter.owner, parameter)),
            "name": name_text(entry.relative),
        }
        comment = ""
        if entry.experts:
            fields = {
                "experts": self.dims.count(
                    parameter.name.split(".experts.0.")[0] + ".experts", entry.experts
                ),
                **fields,
            }
        fields["zero"] = self._zero(entry)
        if entry.when:
            fields["when"] = entry.when
        flag = self._flag(lambda switch: parameter.name in switch.gone)
        if flag:
            own = flag if self.flags[flag].value else f"not {flag}"
            fields["when"] = f"{own} and {entry.when}" if entry.when else own
        if entry.switch:
            flag = self._flag(lambda switch: switch.key == entry.switch)
            other = f"not {flag}" if self.flags[flag].value else flag
            fields["when"] = f"{other} and {entry.when}" if entry.when else other
            return entry.id, fields, ""
        if not parameter.trainable:
            fields["trainable"] = "false"
        tie = self._tie(entry, block)
        if tie:
            fields["tied_to"] = tie
        if parameter.trainable and not parameter.owner:
            if EXPERT.search(parameter.name):
                fields["may_be_absent"] = "true"
                comment = "an expert may get no tokens"
            elif self._absent(entry, block):
                fields["may_be_absent"] = "true"
                self.absent.append(entry.id if block is None else f"{block.id}.{entry.id}")
        return entry.id, fields, comment

    def _shape(self, parameter: Parameter) -> str:
        if parameter.name not in self.known:  # a bias that there is not: as long as its weight is wide
            weight = self.known[f"{parameter.name.removesuffix('bias')}weight"]
            return f"[{self.dims.size(weight, 1 if weight.module == 'Conv1D' else 0)}]"
        return f"[{', '.join(self.dims.size(parameter, axis) for axis in range(len(parameter.shape)))}]"

    def _buffer(self, entry: BufferEntry) -> Row:
        sizes = [self.dims.size(entry.buffer, axis) for axis in range(len(entry.buffer.shape))]
        fields = {"shape": f"[{', '.join(sizes)}]", "name": name_text(entry.relative)}
        if entry.when:
            fields["when"] = entry.when
        return entry.id, fields, ""

    def _names(self, entry: Entry, block: Stack | None) -> list[str]:
        if block is None:
            return [entry.relative]
        return [f"{block.prefix}.{i}.{entry.relative}" for i in entry.indices]

    def _absent(self, entry: Entry, block: Stack | None) -> bool:
        shown = self.facts.backward
        return shown is not None and any(name in shown.absent for name in self._names(entry, block))

    def _zero(self, entry: Entry) -> str:
        """`never` for what one matrix product writes, and for the second name of such a tensor."""
        shown, parameter = self.facts.backward, entry.parameter
        if shown is None or not parameter.trainable:
            return "always"
        if parameter.owner:
            return "never" if parameter.module.endswith("Linear") and parameter.leaf == "weight" else "always"
        tied = [p for p in self.facts.parameters if p.owner == parameter.name]
        flag = self._flag(lambda switch: parameter.name in self._tie_owners(switch))
        if flag and len(parameter.shape) > 1 and all(p.module.endswith("Linear") for p in tied):
            return f"{{unless: {flag}}}"
        return "never" if parameter.name in shown.products and not tied else "always"

    def _tie_owners(self, switch: Switch) -> set[str]:
        owners = {p.name: p.owner for p in self.facts.parameters}
        tied = {owner for name, owner in switch.tied.items() if self._alike(name, switch)}
        return {owners[name] for name in switch.untied} | tied

    def _alike(self, name: str, switch: Switch) -> bool:
        """Whether a weight and the one that it can be tied to have one size in every configuration."""
        return self._shape(self.known[name]) == self._shape(self.known[switch.tied[name]])

    def _tie(self, entry: Entry, block: Stack | None) -> str:
        parameter = entry.parameter
        name = parameter.name
        flag = self._flag(
            lambda switch: name in switch.untied or name in switch.tied and self._alike(name, switch)
        )
        owner = parameter.owner
        if not owner and flag:
            owner = self.flags[flag].tied.get(name, "")
        if not owner:
            return ""
        target = self._target(owner, block, entry)
        if flag:
            target["when"] = flag
        return flow(target) if len(target) > 1 else target["weight"]

    def _target(self, owner: str, block: Stack | None, entry: Entry) -> dict[str, str]:
        """The weight that owns a tensor, as `block` names it."""
        if owner in self.ids:
            return {"weight": self.ids[owner]}
        for other in self.blocks:
            for index in other.indices if owner.startswith(f"{other.prefix}.") else ():
                relative = owner.removeprefix(f"{other.prefix}.{index}.")
                found = next(
                    (e for e in other.entries if e.relative == relative and index in e.indices), None
                )
                if found is not None:
                    own = f"{other.prefix}.{index}.{entry.relative}" == entry.parameter.name
                    place = {} if own and other is block else {"block": other.id, "at": str(index)}
                    return {"weight": found.id, **place}
        raise InferError(
            "the model shares parameters in a way that the spec language cannot say",
            [f"{entry.parameter.name}: is the same parameter as {owner}"],
        )

    def _flag(self, concerns: object) -> str:
        """The flag for a switch that concerns a weight, declared at its first use; "" for none."""
        for switch in self.facts.switches:
            if switch.harmless and concerns(switch):  # type: ignore[operator]
                for name, known in self.flags.items():
                    if known.key == switch.key:
                        return name
                ties = bool(switch.untied or switch.tied)
                name = (
                    "tied_embeddings"
                    if ties and "tie" in switch.key
                    else dim_name(switch.key, self.dims.names)
                )
                self.flags[name] = switch
                return name
        return ""
