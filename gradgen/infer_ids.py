"""Short ids for weights and blocks, as a person would choose them: q_proj, input_norm, embedding, decoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gradgen.identifiers import bad_identifier, bad_model_name
from gradgen.infer_facts import word_set

# Words that do not tell one weight from another; the component before is needed too.
_VAGUE = word_set(
    "weight linear linears dense layer layers proj projection original0 original1 module base_layer conv default output "
    "lora_a lora_b kernel fn base scale"
)
_SAME = {
    "layernorm": "norm",
    "layer_norm": "norm",
    "wte": "token_embedding",
    "wpe": "position_embedding",
    "embed_tokens": "embedding",
    "tok_embeddings": "embedding",
    "tokens_embed": "embedding",
    "word_embeddings": "embedding",
    "embeddings": "embedding",
    "embed_positions": "position_embedding",
    "position_embeddings": "position_embedding",
    "token_type_embeddings": "type_embedding",
    "embed_in": "embedding",
    "c_attn": "qkv_proj",
    "c_fc": "up_proj",
}
_FINAL = word_set("norm ln_f norm_f final_norm")
_IGNORED = word_set("parametrizations weight")
_PLAIN = word_set(
    "model transformer layers layer blocks block h stack stages stage language_model text_model"
)


def weight_ids(names: Sequence[str], outside: bool, taken: Iterable[str] = ()) -> dict[str, str]:
    """An id for each name, in order. `names` are relative to their block, or whole for weights outside.

    A weight and the bias of one module get one stem, the shortest end of the path that no other module has.
    """
    paths = {name: _path(name) for name in names}
    words = {
        path: [snake(part) for part in path.split(".") if part not in _IGNORED] or ["weight"]
        for path in paths.values()
    }
    length = {path: _shortest(words[path]) for path in words}
    used = set(taken)
    while True:
        stems = {path: _stem(words[path][-length[path] :], outside) for path in words}
        groups: dict[str, list[str]] = {}
        for path, stem in stems.items():
            groups.setdefault(stem, []).append(path)
        longer = [
            path
            for stem, group in groups.items()
            if len(group) > 1
            or stem in used
            or bad_identifier(stem)
            or any(words[path][-length[path]].isdecimal() for path in group)
            for path in group
            if length[path] < len(words[path])
        ]
        if not longer:
            return _settle({name: _id(name, stems[paths[name]], set(names)) for name in names}, used)
        for path in longer:
            length[path] += 1


def _path(name: str) -> str:
    """The module's, for its weight and bias; else the parameter's own."""
    module, _, leaf = name.rpartition(".")
    return module if leaf in ("weight", "bias") and module else name


def snake(text: str) -> str:
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", text)
    text = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    text = re.sub(r"layer_?norm(?=_|$)", "norm", text)
    return _SAME.get(text, text)


def _shortest(parts: Sequence[str]) -> int:
    length = 1
    while length < len(parts) and (parts[-length] in _VAGUE or parts[-length].isdecimal()):
        length += 1
    return length


def _stem(words: Sequence[str], outside: bool) -> str:
    text = re.sub(r"_+", "_", "_".join(words)).strip("_")
    if outside and text in _FINAL:
        text = "final_norm"
    return text if re.match(r"[a-z]", text) else f"w_{text}"


def _id(name: str, stem: str, names: set[str]) -> str:
    """`q_proj` and `q_bias`; a bias alone keeps the whole stem."""
    module, _, leaf = name.rpartition(".")
    if leaf != "bias" or not module:
        return stem
    return re.sub(r"_proj$", "", stem) + "_bias" if f"{module}.weight" in names else f"{stem}_bias"


def _settle(ids: Mapping[str, str], used: set[str]) -> dict[str, str]:
    """What is still taken, too long or a reserved word gets a number or a suffix."""
    out: dict[str, str] = {}
    seen = set(used)
    for name, id in ids.items():
        id = id[-60:].lstrip("_0123456789") if len(id) > 60 else id
        if bad_identifier(id):
            id = f"{id}_weight"
        candidate, number = id, 2
        while candidate in seen or bad_identifier(candidate):
            candidate, number = f"{id}_{number}", number + 1
        seen.add(candidate)
        out[name] = candidate
    return out


def stack_ids(prefixes: Sequence[str], causal: bool, taken: Iterable[str]) -> dict[str, str]:
    """An id for each stack. One stack is the `decoder` of a language model, else `encoder` or what its name says."""
    paths = {prefix: [snake(part) for part in prefix.split(".")] for prefix in prefixes}
    used = set(taken)
    out: dict[str, str] = {}
    for prefix, path in paths.items():
        words = [word for word in path if word not in _PLAIN and not word.isdecimal()]
        others = [set(paths[other]) for other in prefixes if other != prefix]
        telling = [word for word in words if not all(word in other for other in others)] if others else words
        numbers = [word for word in path if word.isdecimal()]
        if not others:
            known = [word for word in words if word in ("encoder", "decoder")]
            id = known[-1] if known else "decoder" if causal else "layer"
        else:
            id = re.sub(r"_(layers?|blocks?)$", "", "_".join(telling[-2:])) or (
                "decoder" if causal and "decoder" not in out.values() else path[-1]
            )
        id = "_".join([re.sub(r"^(layers?|blocks?)$", "stage", id) if numbers else id, *numbers])
        id = re.sub(r"_+", "_", id).strip("_")
        id = id if re.match(r"[a-z]", id) else f"stack_{id}"
        candidate, number = id, 2
        while candidate in used or bad_identifier(candidate):
            candidate, number = f"{id}_{number}", number + 1
        used.add(candidate)
        out[prefix] = candidate
    return out


_SHOWS = {
    "attention": r"q_proj|qkv|query|attn",
    "dense": r"(^|[._])(gate|up|down|fc|fc1|fc_in|w1|mlp|ffn|feed_forward)([._]|$)",
}


def kind_words(kinds: Sequence[Iterable[str]]) -> list[str]:
    """What tells the kinds of one stack apart: `moe` and `dense`, `mamba` and `attention`, else letters."""
    names = [set(names) for names in kinds]
    common = set.intersection(*names)
    texts = ["\n".join(sorted(own)).lower() for own in names]
    words: list[list[str]] = [[] for _ in kinds]
    for pattern, word, other in (
        (r"cross_att|crossatt|encoder_attn", "cross", ""),
        (
            r"a_log|mamba|ssm|linear_attn|delta|rglru|recurrent|(^|\.)conv\.|short_conv",
            "recurrent",
            "attention",
        ),
        (r"expert|router|moe", "moe", "dense"),
        (r"indexer", "indexed", ""),
    ):
        has = [re.search(pattern, text, re.MULTILINE) is not None for text in texts]
        if any(has) and not all(has):
            for k, yes in enumerate(has):
                plain = other if other and re.search(_SHOWS[other], texts[k]) else ""
                words[k].append(_special(texts[k], word) if yes else plain)
    labels = ["_".join(word for word in own if word) for own in words]
    for k, label in enumerate(labels):
        if labels.count(label) > 1 or not label:
            extra = sorted({name.split(".")[0] for name in names[k] - common})
            hint = snake(extra[0]) if not label and len(extra) == 1 else ""
            labels[k] = "_".join(part for part in (label, hint) if part)
    seen: dict[str, int] = {}
    out = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        letter = chr(ord("a") + seen[label] - 1) if labels.count(label) > 1 or not label else ""
        out.append("_".join(part for part in (label, letter) if part))
    return out


def _special(text: str, word: str) -> str:
    """The recurrence has many names; a spec uses the model's."""
    if word != "recurrent":
        return word
    for name in ("mamba", "rglru", "linear_attn", "delta", "a_log", "conv"):
        if name in text:
            return {"linear_attn": "linear", "rglru": "recurrent", "a_log": "mamba"}.get(name, name)
    return word


def model_id(text: str) -> str:
    """A model id out of a class name or a model type."""
    name = re.sub(r"_+", "_", re.sub(r"[^a-z0-9]+", "_", snake(text))).strip("_")[:60]
    if not re.match(r"[a-z]", name):
        name = f"model_{name}".rstrip("_")
    return f"{name}_model" if bad_model_name(name) else name
