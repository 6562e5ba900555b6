"""Commands that read headers only, on a real (tiny) checkpoint."""

from __future__ import annotations

import json

import golden
import numpy as np
import pytest
from PIL import Image
from words import word_tokenizer

from flaxen.cli import main
from flaxen.convert.compare import compare
from flaxen.convert.formats.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path):
    return golden.write_folder(golden.case("qwen3"), tmp_path / "qwen3", shards=2)


def test_show(folder, capsys):
    assert main(["show", str(folder), "--mesh", "fsdp=2,tp=2", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    sizes = [array.size for array in golden.case("qwen3").weights.values()]
    assert written["parameters"] == sum(sizes)
    assert written["bytes_per_device"] < written["bytes"] / 3


def test_doctor_is_content_with_a_whole_model(folder, capsys):
    assert main(["doctor", str(folder), "--read", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["problems"] == []
    assert written["files"]["format"] == "safetensors" and not written["files"]["not used"]
    assert written["memory"]["cache_per_token"] == 2 * 2 * 2 * 16 * 4
    assert "jax" in written["environment"]


def test_doctor_tells_which_tensors_are_missing(folder, capsys):
    case = golden.case("qwen3")
    less = {k: v for k, v in case.weights.items() if k != "model.norm.weight"}
    golden.write_folder(golden.Case("less", case.about, case.arrays, less), folder)
    assert main(["doctor", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "model.norm.weight" in printed and "1 tensors are missing" in printed


def test_doctor_on_a_config_key_that_nobody_reads(folder, capsys):
    changed(folder, logit_scale=0.5)
    assert main(["doctor", str(folder), "--json"]) == 1
    assert "logit_scale" in json.loads(capsys.readouterr().out)["checkpoint"]["unread"]


def test_doctor_tells_when_it_does_not_fit(folder, capsys):
    assert main(["doctor", str(folder), "--length", "1000g", "--json"]) == 1
    assert "do not fit" in json.loads(capsys.readouterr().out)["problems"][0]


def test_doctor_describes_the_files_of_a_model_that_is_not_known(folder, capsys):
    changed(folder, model_type="unheard_of")
    assert main(["doctor", str(folder), "--json"]) == 1
    written = json.loads(capsys.readouterr().out)
    assert written["files"]["tensors"] == 25
    assert "unheard_of" in written["problems"][0]


def test_doctor_reads_values_that_are_no_numbers(folder, capsys):
    case = golden.case("qwen3")
    bad = {k: v.copy() for k, v in case.weights.items()}
    bad["model.norm.weight"][3] = np.nan
    bad["model.layers.0.mlp.up_proj.weight"][:] = 0
    golden.write_folder(golden.Case("bad", case.about, case.arrays, bad), folder)
    assert main(["doctor", str(folder), "--read", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert "model.layers.0.mlp.up_proj.weight: every value is 0" in problems
    assert "model.norm.weight: 1 values are NaN or infinite" in problems


def test_doctor_names_weight_files_that_are_not_used(folder, capsys):
    (folder / "consolidated.pt").write_bytes(b"x")
    main(["doctor", str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["files"]["not used"] == ["consolidated.pt"]


def changed(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def test_diff_of_a_model_and_its_copy(folder, tmp_path, capsys):
    copy = golden.write_folder(golden.case("qwen3"), tmp_path / "copy")
    assert main(["diff", str(folder), str(copy)]) == 0
    assert "all 25 tensors bit for bit" in capsys.readouterr().out


def test_diff_names_config_keys_that_differ(folder, tmp_path, capsys):
    copy = golden.write_folder(golden.case("qwen3"), tmp_path / "copy")
    changed(copy, rms_norm_eps=0.5)
    assert main(["diff", str(folder), str(copy), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["config"] == {"rms_norm_eps": [1e-3, 0.5]}


def test_diff_tells_how_far_a_dtype_rounds(folder, tmp_path, capsys):
    main(["convert", str(folder), str(tmp_path / "bf16"), "--dtype", "bfloat16", "--json"])
    capsys.readouterr()
    assert main(["diff", str(folder), str(tmp_path / "bf16"), "--json"]) == 1
    written = json.loads(capsys.readouterr().out)
    assert len(written["different"]) == 25
    assert all(0 < each["relative"] < 2**-8 for each in written["different"])


def test_convert_dry_run_names_every_tensor_and_writes_nothing(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "new"), "--dry-run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["weights"]
    assert sum(row["bytes"] for row in rows) == sum(
        array.nbytes for array in golden.case("qwen3").weights.values()
    )
    named = {name for row in rows for name in row["names"]}
    assert named == set(golden.case("qwen3").weights)
    assert not (tmp_path / "new").exists()


def test_a_dry_run_folds_layers_and_names_the_keys_of_the_file(tmp_path, capsys):
    moe = golden.write_folder(golden.case("mixtral"), tmp_path / "moe")
    assert main(["convert", str(moe), str(tmp_path / "new"), "--dry-run", "--json"]) == 0
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)["weights"]}
    row = rows["layers.1.mlp.experts.up_proj.weight"]
    keys = [f"model.layers.1.block_sparse_moe.experts.{i}.w3.weight" for i in range(4)]
    assert row["tensors"] == keys
    main(["convert", str(moe), str(tmp_path / "new"), "--dry-run"])
    assert "layers.{0, 1}.mlp.experts.up_proj.weight" in capsys.readouterr().out


def test_convert_to_gguf_keeps_every_bit(tmp_path):
    here = golden.write_folder(golden.case("llama"), tmp_path / "here")
    there = str(tmp_path / "there.gguf")
    assert main(["convert", str(here), there, "--dtype", "float32"]) == 0
    assert compare(open_checkpoint(here), open_checkpoint(there)).same


def test_convert_to_fp8_says_what_stays(tmp_path, capsys):
    here = golden.write_folder(golden.case("llama"), tmp_path / "here")
    assert main(["convert", str(here), str(tmp_path / "fp8"), "--quantize", "fp8"]) == 0
    assert "matrices in float8" in capsys.readouterr().err
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize("target, kind", [("x.gguf", "fp8"), ("folder", "q8_0"), ("x", "int3")])
def test_ways_to_quantise_that_a_target_cannot_hold_are_refused(folder, target, kind, capsys):
    assert main(["convert", str(folder), target, "--quantize", kind]) == 2
    assert "for it there is" in capsys.readouterr().err


def test_convert(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "new"), "--dtype", "bfloat16"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"


def test_keys_are_renamed_for_a_command(tmp_path, capsys):
    case = golden.case("llama")
    odd = golden.Case(
        "odd", case.about, case.arrays, {f"x.{k}": v for k, v in case.weights.items()}
    )
    there = golden.write_folder(odd, tmp_path / "odd")
    assert main(["convert", str(there), str(tmp_path / "new"), "--key-mapping", r"^x\.="]) == 0
    assert set(open_checkpoint(tmp_path / "new")) == set(case.weights)
    assert main(["show", str(there), "--key-mapping", r"^x\.=", "--json"]) == 0
    capsys.readouterr()
    assert main(["show", str(there), "--key-mapping", "x"]) == 2
    assert "lacks a '='" in capsys.readouterr().err


def test_a_damaged_tokenizer_is_a_problem(folder, capsys):
    (folder / "tokenizer.json").write_text("garbage")
    assert main(["doctor", str(folder), "--json"]) == 1
    assert "damaged" in json.loads(capsys.readouterr().out)["problems"][0]


def test_a_config_of_another_type_is_a_problem_and_no_traceback(folder, capsys):
    changed(folder, num_hidden_layers="thirty")
    assert main(["doctor", str(folder), "--json"]) == 1


def test_convert_dry_run_tells_what_does_not_fit(folder, tmp_path, capsys):
    changed(folder, intermediate_size=8)
    assert main(["convert", str(folder), str(tmp_path / "new"), "--dry-run", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["weights"] and "up_proj" in err


def test_a_converted_model_is_equal_to_its_source(folder, tmp_path, capsys):
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 0
    assert main(["diff", str(folder), str(tmp_path / "new")]) == 0
    assert "equal" in capsys.readouterr().out


def test_names_in_brackets_are_printed_as_they_are(folder, tmp_path, capsys):
    case = golden.case("qwen3")
    odd = case.weights | {"a[/b].[red]:smile:": np.ones(3, np.float32)}
    other = golden.write_folder(golden.Case("odd", case.about, case.arrays, odd), tmp_path / "odd")
    changed(other, architectures=["[/red]"])
    assert main(["diff", str(folder), str(other)]) == 1
    printed = capsys.readouterr().out
    assert "a[/b].[red]:smile:" in printed and "['[/red]']" in printed
    assert main(["doctor", str(other)]) == 1
    assert "a[/b].[red]:smile:" in capsys.readouterr().out


def test_numbers_that_json_does_not_know_are_texts(folder, tmp_path, capsys):
    case = golden.case("qwen3")
    bad = {k: v.copy() for k, v in case.weights.items()}
    bad["model.norm.weight"][3] = np.nan
    other = golden.write_folder(golden.Case("bad", case.about, case.arrays, bad), tmp_path / "bad")
    assert main(["diff", str(folder), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert found["different"][0]["largest"] == "inf"


def test_doctor_reports_a_config_that_no_tokenizer_can_be_made_beside(tmp_path, capsys):
    folder = golden.write_folder(golden.case("llama"), tmp_path)
    word_tokenizer(128).save_pretrained(folder)
    changed(folder, num_attention_heads=7)
    assert main(["doctor", str(folder), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert any("attention heads (7)" in problem for problem in problems)


def test_doctor_names_the_quantisation(folder, tmp_path, capsys):
    target = str(tmp_path / "fp8")
    assert main(["convert", str(folder), target, "--quantize", "fp8", "--json"]) == 0
    capsys.readouterr()
    assert main(["doctor", target, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["quantization"] == "fp8"


@pytest.mark.parametrize("dtype, stored", [("bf16", "bfloat16"), ("fp32", "float32")])
def test_short_names_of_dtypes_reach_a_gguf_file(tmp_path, dtype, stored):
    here = golden.write_folder(golden.case("llama"), tmp_path / "here")
    there = tmp_path / "there.gguf"
    assert main(["convert", str(here), str(there), "--dtype", dtype]) == 0
    assert open_checkpoint(there)["model.embed_tokens.weight"].dtype == stored


def test_an_encoder_decoder_answers_without_a_template(tmp_path, capsys):
    path = str(golden.write_folder(golden.case("t5"), tmp_path))
    word_tokenizer(41).save_pretrained(path)
    texts = []
    for more in ([], ["--raw"]):
        assert main(["generate", path, "a b c", "--max-tokens", "3", "--json", *more]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1] and len(texts[0]["tokens"]) == 4
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    assert main(["generate", path, "a", "--raw", "--image", str(tmp_path / "x.png")]) == 2
    assert "takes no pictures" in capsys.readouterr().err


def test_a_model_that_gives_no_text_says_what_it_is(tmp_path, capsys):
    path = str(golden.write_folder(golden.case("bert"), tmp_path))
    word_tokenizer(41).save_pretrained(path)
    assert main(["generate", path, "a b c"]) == 2
    assert "cannot generate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "program"), [("model.bin", "CTranslate2"), ("tf_model.h5", "TensorFlow")]
)
def test_files_of_other_programs_are_named(file, program, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(b"\6\0\0\0\x0c\0WhisperSpec\0")
    assert main(["show", str(tmp_path)]) == 2
    assert f"{file} is a file of {program}" in capsys.readouterr().err
