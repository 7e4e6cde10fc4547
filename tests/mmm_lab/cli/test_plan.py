"""``mmm plan``: what it prints and writes; and bad input, which is refused in one line, with exit code 2."""

import json
from pathlib import Path

import pytest

from mmm_lab.cli.main import main
from mmm_lab.planner.named_model import read_model

SMALL = ["plan", "--model", "llama-8b", "--site", "polaris", "--nhosts", "4", "--global-batch", "32"]
# Llama 3 8B, as Hugging Face describes it.
LLAMA_CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}  # fmt: skip


def test_all_that_is_written(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("plan.json", "job.sh")}
    flags = ["--json", str(files["plan.json"]), "--script", str(files["job.sh"])]
    assert main([*SMALL, "--explain", *flags]) == 0
    text = capsys.readouterr().out
    for argv in (
        "the fastest",
        "why the other kinds of layout lost",
        "the decision tree says: ",
        "sent a step, GB",
        "assumed",
    ):
        assert argv in text
    assert "does the model fit on one device?" in text
    assert "https://docs.alcf.anl.gov/polaris" in text
    line = next(line for line in text.splitlines() if line.startswith("launch "))
    assert line in files["job.sh"].read_text()
    listed = json.loads(files["plan.json"].read_text())
    fitting = [entry["step_seconds"] for entry in listed if entry["fits"]]
    assert len(fitting) > 10
    assert [entry["fits"] for entry in listed] == sorted((entry["fits"] for entry in listed), reverse=True)


def test_a_hugging_face_config(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_CONFIG))
    ours = read_model("llama-8b", {}, 512)
    theirs = read_model(str(tmp_path), {}, 512)
    assert (theirs.parameters, theirs.config) == (ours.parameters, ours.config)
    assert main(["plan", "--model", str(path), "--site", "dgx-h100", "--nhosts", "1"]) == 0
    assert f"mmm.trainer.lm --init_from {tmp_path} " in capsys.readouterr().out
    path.write_text(json.dumps({**LLAMA_CONFIG, "model_type": "mamba"}))
    assert main(["plan", "--model", str(path), "--site", "dgx-h100", "--nhosts", "1"]) == 2
    assert "mamba" in capsys.readouterr().err


# How Llama 3.1 stretches its rotary angles.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 10**30}}, "rope_scaling"),
        *(({"rope_scaling": LLAMA3 | {name: 10**400}}, "rope_scaling") for name in LLAMA3 if name != "rope_type"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"hidden_size": 10**30}, "hidden_size"),
    ],
)
def test_a_config_with_a_number_that_no_size_has_is_refused_by_its_key(tmp_path, capsys, changed, name):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG | changed))
    assert main(["plan", "--model", str(tmp_path), "--site", "dgx-h100", "--nhosts", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert len(line) < 400


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "lama-8b", "--nhosts", "1"], "Did you mean llama-8b?"),
        (["--model", "missing.json", "--nhosts", "1"], "cannot be read"),
        (["--model", "vit", "--nhosts", "1", "--dim", "64"], "--dim with --model vit"),
        (["--model", "llama-8b", "--dim", "65", "--nhosts", "1"], "n_heads 32"),
        (["--model", "llama-8b", "--n-layers", "99999999", "--nhosts", "1"], "from 0 to 1,000,000"),
        (["--model", "llama-8b"], "which machine?"),
        (["--model", "llama-8b", "--site", "aurorra", "--nhosts", "1"], "Did you mean aurora?"),
        (["--model", "llama-8b", "--site", "aurora"], "--nhosts is missing"),
        (["--model", "llama-8b", "--site", "polaris", "--nhosts", "561"], "Polaris has 560"),
        (
            ["--model", "llama-8b", "--site", "polaris", "--machine", "x", "--nhosts", "1"],
            "not allowed with argument --site",
        ),
        (["--model", "llama-8b", "--nhosts", "0"], "--nhosts: 0: it must be"),
        (["--model", "llama-8b", "--nhosts", "many"], "invalid count value"),
        (["--model", "llama-8b", "--nhosts", "1", "--gpu-memory", "64 bananas"], "--gpu-memory: 64 bananas"),
        (["--model", "llama-8b", "--nhosts", "1", "--gpu-memory", "64"], "give a unit"),
        (["--model", "llama-8b", "--nhosts", "1", "--global-batch", "0"], "--global-batch: 0: "),
        (["--model", "llama-8b", "--nhosts", "1", "--global-batch", "99999999999"], "10,000,000"),
        (
            ["--model", "llama-8b", "--nhosts", "1", "--global-batch", "7", "--pp", "1", "--tp", "1", "--cp", "1"],
            "7 does not",
        ),
        (["--model", "llama-8b", "--nhosts", "1", "--seq-length", "0"], "--seq-length: 0: "),
        (["--model", "llama-8b", "--nhosts", "1", "--top", "0"], "--top: 0: "),
        (["--model", "llama-8b", "--nhosts", "1", "--nonsense"], "unrecognized arguments"),
        (["--model", "llama-8b", "--nhosts", "1", "--global_batch", "8"], "Did you mean --global-batch?"),
        (["--model", "gpt2", "--nhosts", "1", "--json", "/no/such/folder/x"], "--json /no/such/folder/x"),
        (["--model", "llama-70b", "--site", "polaris", "--nhosts", "1", "--seq-length", "8192"], "GiB are missing"),
        # It is not short for --exactly.
        (["--model", "llama-8b", "--nhosts", "1", "--exact"], "unrecognized arguments: --exact"),
        ([], "required: --model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(monkeypatch, capsys, flags, message):
    monkeypatch.chdir(Path(__file__).parent.parent / "planner")
    assert main(["plan", *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert error.startswith("mmm: error: ")


def test_the_tree_is_shown_where_nothing_fits_and_where_tp_spans_hosts(capsys):
    polaris = ["plan", "--site", "polaris", "--nhosts"]
    assert main([*polaris, "1", "--model", "llama-70b", "--seq-length", "8192"]) == 2
    out = capsys.readouterr().out
    assert "the decision tree says: " in out
    assert "does the model fit on one device?              no" in out
    assert main([*polaris, "4", "--model", "llama-8b", "--tp", "8", "--global-batch", "16"]) == 0
    assert "note: tp 8 spans hosts of 4 devices" in capsys.readouterr().out


def test_exactly_one_layout(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main([*SMALL, "--exactly", "--tp", "4", "--microbatches", "2", "--json", str(file)]) == 0
    (entry,) = json.loads(file.read_text())
    assert (entry["layout"]["dp_shard"], entry["layout"]["tp"]) == (4, 4)
    assert entry["sent_bytes"].keys() == {"dp_shard", "tp"}
    assert "--tp 4 --microbatches 2" in capsys.readouterr().out.splitlines()[-1]
    assert main([*SMALL, "--exactly", "--tp", "3"]) == 2
    error = capsys.readouterr().err
    assert "llama-8b on 16" in error


def test_a_run_of_so_many_tokens(capsys):
    """Steps, hours and node-hours follow from the step time of the answer; a checkpoint has weights and two moments."""
    assert main([*SMALL, "--tokens", "20B", "--seq-length", "2048"]) == 0
    text = capsys.readouterr().out
    seconds = float(text.split("\nlayout ")[1].splitlines()[1].split()[1])
    steps = -(-20_000_000_000 // (32 * 2048))
    *_, tokens, size = text.splitlines()
    assert tokens.startswith(f"20,000,000,000 tokens: {steps:,} steps, {steps * seconds / 86400:,.0f}"[:-2])
    hours = float(tokens.split(" node-hours")[0].split()[-1].replace(",", ""))
    assert hours == pytest.approx(4 * steps * seconds / 3600, rel=1e-2)
    assert size.startswith("a checkpoint is 96.36 GB; 2 stay (--keep), 192.73 GB, and 289.09 GB while")
    trial = next(line for line in text.splitlines() if line.startswith("launch "))
    # It starts as it stands.
    assert trial.endswith(" --dataset random --max_iters 20")
