"""`gradgen infer` on transformers configurations: dims, flags, kinds, the command line, and configurations it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from gradgen.configure import configure, from_hf, materialize
from gradgen.diagnostics import UsageError
from gradgen.infer import Inferred, infer_class, infer_file
from gradgen.infer_config import class_for
from gradgen.infer_facts import InferError
from gradgen.infer_transformers import build
from gradgen.resolve import check_text

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def spec(name: str, **values: Any) -> Inferred:
    return infer_class(getattr(transformers, name), getattr(transformers, name).config_class(**values))


def agrees(text: str, name: str, **values: Any) -> None:
    """The spec, configured from another configuration of the same class, has that model's parameters."""
    cls = getattr(transformers, name)
    config = cls.config_class(**values)
    parameters = dict(build(cls, config).named_parameters(remove_duplicate=False))
    model = check_text(text, "inferred.yaml")
    concrete = materialize(model, configure(model, from_hf(model, config)))
    said = {weight.name: weight for weight in concrete.weights}
    said |= {
        f"{b.name.replace('{i}', str(i))}.{w.name}": w
        for b in concrete.blocks
        for i in b.layers
        for w in b.weights
    }
    assert {n: w.shape for n, w in said.items()} == {n: tuple(p.shape) for n, p in parameters.items()}
    distinct = len({id(p) for p in parameters.values()})
    assert sum(w.tie is None for w in said.values()) == distinct


def lines(text: str, start: str) -> list[str]:
    """The entries under a top-level key."""
    section = text.split(f"\n{start}:\n", 1)[1]
    return [line.strip() for line in section.split("\n\n", 1)[0].splitlines()]


def test_llama_is_inferred_as_it_is_shipped() -> None:
    text = spec("LlamaForCausalLM", **LLAMA).text
    assert lines(text, "dims") == [
        "vocab:    {hf: vocab_size}",
        "hidden:   {hf: hidden_size}",
        "layers:   {hf: num_hidden_layers}",
        "heads:    {hf: num_attention_heads}",
        "kv_heads: {hf: num_key_value_heads, default: heads}",
        "head_dim: {hf: head_dim, default: hidden // heads}",
        "ffn:      {hf: intermediate_size}",
    ]
    assert "tied_embeddings: {hf: tie_word_embeddings, default: false}" in lines(text, "flags")
    assert "llama: {vocab: 96, hidden: 32, layers: 3, heads: 4, kv_heads: 2, ffn: 56}" in lines(
        text, "presets"
    )
    assert (
        "q_proj:              {shape: [heads * head_dim, hidden], name: self_attn.q_proj.weight, zero: never}"
        in text
    )
    assert (
        "k_proj:              {shape: [kv_heads * head_dim, hidden], name: self_attn.k_proj.weight, zero: never}"
        in text
    )
    assert "zero: never, tied_to: {weight: embedding, when: tied_embeddings}" in text
    assert "backward: [lm_head, final_norm, {block: decoder}, embedding]" in text


@pytest.mark.parametrize(
    ("name", "small", "other"),
    [
        (
            "LlamaForCausalLM",
            LLAMA,
            {**LLAMA, "hidden_size": 48, "num_hidden_layers": 2, "tie_word_embeddings": True},
        ),
        ("LlamaForCausalLM", LLAMA, {**LLAMA, "attention_bias": True, "mlp_bias": True}),
        ("Qwen3ForCausalLM", LLAMA, {**LLAMA, "head_dim": 24, "num_key_value_heads": 4}),
        (
            "GPT2LMHeadModel",
            {"n_embd": 32, "n_layer": 2, "n_head": 4},
            {"n_embd": 48, "n_layer": 3, "tie_word_embeddings": False},
        ),
        (
            "OPTForCausalLM",
            {},
            {"enable_bias": False, "do_layer_norm_before": False, "ffn_dim": 100, "hidden_size": 48},
        ),
        (
            "DeepseekV3ForCausalLM",
            {"num_hidden_layers": 5, "first_k_dense_replace": 2},
            {
                "num_hidden_layers": 6,
                "first_k_dense_replace": 4,
                "kv_lora_rank": 32,
                "n_routed_experts": 16,
                "q_lora_rank": 24,
            },
        ),
        (
            "Mamba2ForCausalLM",
            {"num_hidden_layers": 2},
            {"hidden_size": 128, "num_heads": 16, "head_dim": 16, "state_size": 24},
        ),
    ],
)
def test_other_sizes_of_the_same_class_fit_the_spec(
    name: str, small: dict[str, Any], other: dict[str, Any]
) -> None:
    text = spec(name, **small).text
    agrees(text, name, **small)
    agrees(text, name, **other)


def test_equal_sizes_are_told_apart() -> None:
    """With hidden = heads * head_dim = ffn, values alone would say nothing."""
    same = {**LLAMA, "intermediate_size": 32, "num_key_value_heads": 4, "vocab_size": 32}
    agrees(spec("LlamaForCausalLM", **same).text, "LlamaForCausalLM", **{**LLAMA, "head_dim": 24})


def test_dense_layers_before_experts_follow_their_key() -> None:
    text = spec("DeepseekV3ForCausalLM", num_hidden_layers=5, first_k_dense_replace=2).text
    assert (
        "  decoder_dense:\n    count: layers\n    name: model.layers.{i}\n    at: i < dense_layers\n" in text
    )
    assert (
        "  decoder_moe:\n    count: layers\n    name: model.layers.{i}\n    at: i >= dense_layers\n" in text
    )
    assert "{block: [decoder_dense, decoder_moe]}" in text


def test_periodic_kinds() -> None:
    values = {
        "num_hidden_layers": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "expert_layer_period": 2,
    }
    text = spec("JambaForCausalLM", **values).text
    assert "at: i % 4 == 2" in text and "at: i % 2 == 1" in text and "at: i % 4 == 0" in text


def test_weights_without_a_gradient_may_be_absent() -> None:
    result = spec("BartForCausalLM", decoder_layers=2, d_model=32, vocab_size=60, decoder_ffn_dim=40)
    absent = [
        line for line in result.text.splitlines() if "may_be_absent" in line and not line.startswith("#")
    ]
    assert absent and all("name: encoder_attn" in line for line in absent)
    assert any(finding.startswith("got no gradient from input_ids") for finding in result.findings)


def test_frozen_weights() -> None:
    text = spec(
        "RoFormerForCausalLM", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, is_decoder=True
    ).text
    assert "name: roformer.encoder.embed_positions.weight, zero: always, trainable: false}" in text


def saved(folder: Path, data: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def test_a_folder_a_file_and_a_class_give_one_spec(tmp_path: Path) -> None:
    folder = saved(tmp_path, {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA})
    text = spec("LlamaForCausalLM", **LLAMA).text
    assert infer_file(folder).text == infer_file(folder / "config.json").text == text


def test_a_configuration_without_architectures_means_a_language_model(tmp_path: Path) -> None:
    assert "LlamaForCausalLM" in infer_file(saved(tmp_path, {"model_type": "llama", **LLAMA})).text
    assert class_for({"model_type": "t5"})[0].__name__ == "T5ForConditionalGeneration"
    assert class_for({"model_type": "vit"})[0].__name__ == "ViTForImageClassification"


def test_remote_code_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "mine.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: pass\n")
    remote = {"auto_map": {"AutoModelForCausalLM": "mine.Mine", "AutoConfig": "mine.Mine"}}
    for data in ({"model_type": "mine"}, {"model_type": "llama", "architectures": ["MineForCausalLM"]}):
        with pytest.raises(
            InferError, match=r"asks for code of its own \(auto_map\).*gradgen runs no remote code"
        ):
            infer_file(saved(tmp_path, {**data, **remote}))
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **LLAMA, **remote}
    assert infer_file(saved(tmp_path, known)).text == spec("LlamaForCausalLM", **LLAMA).text
    assert not marker.exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "the configuration has no model_type"),
        ({"model_type": "nope"}, "no model type 'nope'; a newer version may have it"),
        ({"model_type": "llama", "architectures": ["NopeForCausalLM"]}, "has no class 'NopeForCausalLM'"),
        ({"model_type": "llama", "hidden_size": "big"}, "transformers does not take this configuration"),
        (
            {"model_type": "nemotron"},
            "transformers cannot build NemotronForCausalLM from this configuration: TypeError",
        ),
    ],
)
def test_configurations_that_transformers_does_not_know(
    data: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InferError) as caught:
        infer_file(saved(tmp_path, data))
    assert said in str(caught.value)


def test_a_quantised_configuration_is_read_as_the_weights_before(tmp_path: Path) -> None:
    data = {"model_type": "llama", **LLAMA, "quantization_config": {"quant_method": "fp8"}}
    result = infer_file(saved(tmp_path, data))
    assert (
        "the configuration asks for quantised weights; these are the gradients of the weights before that"
        in result.findings
    )


def test_the_command_line_writes_whole_files_or_none(cli: Callable[..., Any], tmp_path: Path) -> None:
    saved(tmp_path, {"model_type": "llama", **LLAMA})
    done = cli("infer", "config.json", "-o", "mine.yaml", "--name", "mine")
    assert (done.returncode, done.stdout) == (0, "")
    assert (
        done.stderr
        == "mine: spec and model agree on 30 trainable parameters (31,712 elements); 3 blocks of 1 kind\n"
    )
    before = (tmp_path / "mine.yaml").read_text()
    assert before == infer_file(tmp_path, name="mine").text
    assert cli("check", "mine.yaml").returncode == 0

    saved(tmp_path, {"model_type": "llama", "architectures": ["Nope"]})
    failed = cli("infer", ".", "-o", "mine.yaml")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("error: transformers ")
    assert (tmp_path / "mine.yaml").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "mine.yaml"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("missing", "'missing': no such file; a model is a config.json or a folder with one"),
        ("list.json", "list.json: holds no JSON object"),
        ("text.json", "text.json: is not JSON"),
        ("empty", "empty: has no config.json"),
        ("factory_a:nope", "factory_a:nope: cannot import it: module 'factory_a' has no attribute 'nope'"),
        ("nowhere:make", "nowhere:make: cannot import it: No module named 'nowhere'"),
        ("factory_a:number", "factory_a:number: is no function that returns a module"),
        ("factory_a:none", "factory_a:none: returned a NoneType, not a torch.nn.Module"),
        ("factory_a:bad", "factory_a:bad: OSError: gone"),
    ],
)
def test_what_is_no_model(model: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "text.json").write_text("{nope")
    (tmp_path / "factory_a.py").write_text("number = 3\ndef none(): pass\ndef bad(): raise OSError('gone')\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        infer_file(model)
    assert said in str(caught.value)


def test_wrong_usage_of_the_command_line(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = cli("infer", "missing", "-o", "mine.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: 'missing': no such file")
    assert list(tmp_path.iterdir()) == []


def test_a_factory_is_built_without_memory(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "factory.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.ModuleDict({'layers': nn.ModuleList(nn.Linear(2**18, 2**18) for _ in range(4))})\n"
    )
    done = cli("infer", "factory:make", "--name", "wide")
    assert done.returncode == 0, done.stderr
    assert "layer:\n    count: 4\n    name: layers.{i}" in done.stdout
    assert "274,878,955,520 elements" in done.stderr
