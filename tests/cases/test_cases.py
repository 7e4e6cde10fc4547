"""Small runs that once ended wrong without a word, from the command line to what is left, as people meet them."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmm.history import load
from support.clock import PATIENCE
from support.launcher import Launcher
from support.llamas import CONFIG, tensors, write_hugging_face

pytestmark = pytest.mark.long
NET = str(Path(__file__).with_name("own_net.py"))
CPU = ("--device", "cpu")
LM = ("python3", "-m", "mmm.trainer.lm", "--preset", "debug", "--batch_size", "2", "--seq_length", "16", "--no_plots")


@pytest.fixture
def here(tmp_path):
    return Launcher(tmp_path)


def tool(here, program, *words, **variables):
    """Run a program of this environment, without launch."""
    command = [sys.executable, *words] if program == "python3" else [Path(sys.executable).with_name(program), *words]
    environ = here.environment(**variables)
    return subprocess.run(
        command, cwd=here.folder, env=environ, capture_output=True, text=True, errors="replace", timeout=PATIENCE
    )


def ends(done, code=0, says=""):
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def record(here, outdir):
    """Losses of a run, and the loss on what was held out."""
    config = json.loads((here.folder / outdir / "config.json").read_text())
    return [*load(here.folder / outdir).loss.values, config["test_loss"]]


@pytest.mark.parametrize("net", ["batch_statistics", "branches"])
def test_a_net_of_ones_own_has_the_losses_of_plain_pytorch(here, net):
    words = (*CPU, "python3", NET, "--net", net, "--dtype", "fp64", "--global_batch_size", "8")
    ends(here.run("-n", "1", *words, "--plain", "--outdir", "plain"))
    right = record(here, "plain")
    for ranks, technique in ((1, "fsdp"), (2, "fsdp"), (2, "zero1"), (2, "zero2"), (2, "ddp"), (4, "fsdp")):
        outdir = f"{technique}{ranks}"
        ends(here.run("-n", str(ranks), *words, "--technique", technique, "--outdir", outdir))
        np.testing.assert_allclose(record(here, outdir), right, rtol=1e-12, err_msg=outdir)


@pytest.mark.parametrize("technique", ["fsdp", "ddp"])
def test_buffers_of_ones_own_in_bf16(here, technique):
    words = (*CPU, "python3", NET, "--net", "centred", "--global_batch_size", "8", "--technique", technique)
    ends(here.run("-n", "2", *words, "--dtype", "fp32", "--outdir", "whole"))
    ends(here.run("-n", "2", *words, "--dtype", "bf16", "--outdir", "half"))
    np.testing.assert_allclose(record(here, "half"), record(here, "whole"), rtol=0.03)


def test_json_lines_are_documents(here):
    texts = ["The cat sat.\nIt was été.", "Dogs bark."]
    here.write("t.jsonl", "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts) * 40)
    ends(tool(here, "mmm", "tokens", "t.jsonl", "-o", "out"))
    manifest = json.loads((here.folder / "out/manifest.json").read_text())
    assert (manifest["documents"], manifest["tokens"]) == (80, 40 * sum(len(t.encode()) for t in texts))


@pytest.mark.parametrize(
    ("content", "says"),
    [("Grüße".encode("utf-16"), "t.txt"), ("Grüße ".encode() * 99 + b"\xff", "t.txt"), (b"\x89PNG\r\n\x1a\n", "t.txt")],
)
def test_what_is_no_text_is_named(here, content, says):
    (here.folder / "t.txt").write_bytes(content)
    ends(tool(here, "mmm", "tokens", "t.txt", "-o", "out", "--train-bpe", "300"), 2, says)


def test_a_header_is_not_trained_on(here):
    tokens = (np.arange(20_000) % 50).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (here.folder / "t.bin").write_bytes(header.tobytes() + tokens.tobytes())
    tokens.tofile(here.folder / "plain.bin")
    for name in ("t", "plain"):
        ends(here.run("-n", "1", *CPU, *LM, "--text", f"{name}.bin", "--max_iters", "3", "--outdir", name))
    assert load(here.folder / "t").loss.values.tolist() == load(here.folder / "plain").loss.values.tolist()


def test_the_learning_rate_goes_on(here):
    words = (*CPU, *LM, "--dataset", "random", "--lr", "0.01", "--warmup", "2", "--lr_schedule", "cosine")
    words = ("-n", "1", *words, "--checkpoint_every", "4", "--log_every", "1")
    ends(here.run(*words, "--max_iters", "8", "--outdir", "a"))
    done = ends(here.run(*words, "--max_iters", "12", "--outdir", "a", "--resume", "auto"))
    rates = load(here.folder / "a").lr.values
    assert len(rates) == 12
    assert "learning rate" in done.stdout  # of 8 steps it had come to its end, of 12 it has not


def test_folders_of_images(here):
    generator = np.random.default_rng(0)
    for label in "ab":
        for number in range(24):
            path = here.folder / "photos" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 255, (20, 24, 3), np.uint8)).save(path)
    hidden = here.folder / "photos/.ipynb_checkpoints"
    hidden.mkdir()
    (hidden / "0-checkpoint.png").write_bytes((here.folder / "photos/a/0.png").read_bytes())
    deep = here.folder / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    vit = ("python3", "-m", "mmm.trainer.vit", "--dataset", "folder", "--image_size", "16", "--patch_size", "8")
    vit = (*CPU, *vit, "--preset", "debug", "--global_batch_size", "8", "--max_iters", "2", "--no_plots")
    ends(here.run("-n", "2", *vit, "--data_dir", "photos", "--outdir", "a", TMPDIR=str(deep)))
    assert json.loads((here.folder / "a/config.json").read_text())["data"]["classes"] == 2
    (here.folder / "above").mkdir()
    (here.folder / "photos").rename(here.folder / "above/photos")
    ends(here.run("-n", "1", *vit, "--data_dir", "above", "--outdir", "b"), 2, "photos")


def test_a_folder_whose_name_is_no_text(here):
    folder = os.fsencode(here.folder) + b"/Gr\xfc\xdfe"
    os.mkdir(folder)
    words = ("-n", "2", *CPU, "python3", "-m", "mmm.examples.fsdp_tp", "--preset", "debug", "--max_iters", "1")
    ends(tool(here, "launch", *words, "--no_plots", "--outdir", os.fsdecode(folder + b"/o")))
    assert os.path.exists(folder + b"/o/train_dataset.h5")


WHO = "from mmm.runtime.ranks import whoami; r = whoami(); print(r.rank, r.world_size)"


@pytest.mark.parametrize(
    ("environ", "code", "says"),
    [
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "1"}, 0, "1 2"),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1"}, 0, "1 2"),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1"}, 0, "1 2"),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-x@1"}, 1, "PMIX_RANK"),
    ],
)
def test_a_rank_of_another_launcher(here, environ, code, says):
    done = tool(here, "python3", "-c", WHO, MASTER_ADDR="127.0.0.1", MASTER_PORT="29501", **environ)
    assert (done.returncode != 0) == (code != 0)
    assert says in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("lines", "ranks"), [("x1\n" * 4 + "x2\n" * 2, 6), ("n1 slots=4\nn2 slots=2\n", 6), ("n1:4\nn2:4\n", 8)]
)
def test_a_rank_a_slot(here, lines, ranks):
    here.write("hosts", lines)
    words = ("--hostfile", "hosts", *CPU, "--dry-run", "--mpi", "openmpi", "--mpiexec", "/bin/true")
    ends(here.run(*words, "python3", "-m", "mmm.examples.fsdp_tp"), 0, f"ranks           {ranks}, ")


def test_slurms_uneven_tasks(here):
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "c[1-3]", "SLURM_NTASKS": "11", "SLURM_TASKS_PER_NODE": "4(x2),3"}
    ends(here.run(*CPU, "--dry-run", "python3", "-m", "mmm.examples.fsdp_tp", **job), 0, "ranks           11, ")


def test_an_output_matrix_of_its_own(here):
    """`tie_word_embeddings` says one thing, the file another: the file's weights are what is sampled from."""
    weights = tensors(CONFIG)
    for name, said in (("own", False), ("said", True)):
        write_hugging_face(here.folder / name, CONFIG | {"tie_word_embeddings": said}, weights)
        ends(tool(here, "mmm", "import", name, "-o", f"{name}-checkpoint"))
    words = ("--prompt", "abc", "--temperature", "0", "--max-new-tokens", "8", "--dtype", "fp64", *CPU)
    sampled = [ends(tool(here, "mmm", "sample", f"{name}-checkpoint", *words)).stdout for name in ("own", "said")]
    assert sampled[0] == sampled[1]


def test_a_safetensors_file_beside_a_stale_index(here):
    write_hugging_face(here.folder / "m", CONFIG, tensors(CONFIG))
    stale = {"weight_map": dict.fromkeys(tensors(CONFIG), "gone-00001-of-00001.safetensors")}
    here.write("m/model.safetensors.index.json", json.dumps(stale))
    ends(tool(here, "mmm", "import", "m", "-o", "c"), 0, "index")


def test_a_gguf_file_that_is_none(here):
    (here.folder / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    ends(tool(here, "mmm", "import", "m.gguf", "-o", "c"), 2, "m.gguf")
