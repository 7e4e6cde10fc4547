"""Training on conversations: the loss is that of the answers, on every layout; what it leaves answers."""

import json
import random
from pathlib import Path

import pytest
import torch

from mmm.errors import ConfigError, DataError
from mmm.models.llama.model import Transformer
from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.trainer.lm import resolve
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import config_of
from mmm_lab.cli import main as cli
from support.llamas import CONFIG, byte_bpe, write_hugging_face
from support.pool import program_on
from support.resuming import curve, train

END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Flags of a training that takes a second.
SMALL = {
    "seq_length": 48,
    "global_batch_size": 8,
    "max_iters": 4,
    "dtype": "fp64",
    "plots": False,
    "optimizer": "sgd",
    "lr": 0.3,
    "warmup": 2,
    "eval_every": 2,
    "eval_batches": 2,
    "checkpoint_every": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations of one to three turns, some longer than a sequence; and weights with a chat template."""
    folder = tmp_path_factory.mktemp("chats")
    dice = random.Random(0)

    def words(most):
        return "".join(dice.choices("abcdef", k=dice.randint(1, most)))

    with (folder / "chats.jsonl").open("w") as file:
        for _ in range(90):
            turns = [(words(12), words(9)) for _ in range(dice.randint(1, 3))]
            messages = [
                {"role": role, "content": content}
                for turn in turns
                for role, content in zip(("user", "assistant"), turn, strict=True)
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    write_hugging_face(folder / "hf", {**CONFIG, "vocab_size": 257, "eos_token_id": 256})
    (folder / "hf" / "tokenizer.json").write_bytes(byte_bpe((END,)))
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": END}))
    return folder


def flags_of(folder, **more):
    return {**SMALL, "text": (folder / "chats.jsonl",), "init_from": folder / "hf", **more}


@pytest.fixture(scope="module", params=["padded", "packed"])
def alone(folder, request):
    """Flags, and the folder of a run on one rank."""
    pack = {"pack": True, "document_mask": True} if request.param == "packed" else {}
    flags = flags_of(folder, **pack)
    outdir = folder / request.param
    lm.train(configure(lm.Config, **flags, device="cpu", outdir=outdir))
    return flags, outdir


TURN = "<|turn|>"
TURNS = "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<|turn|>\n' }}{% endfor %}"


@pytest.mark.parametrize(("prompt", "eos"), [("{% if add_generation_prompt %}a:{% endif %}", 66), ("", [66, 256])])
def test_the_end_of_a_turn_ends_what_the_model_writes(folder, tmp_path, capsys, prompt, eos):
    """A base model's eos ends its texts, and no turn of its template: the model did not stop, here or elsewhere."""
    base = write_hugging_face(tmp_path / "hf", {**CONFIG, "vocab_size": 258, "eos_token_id": eos})
    (base / "tokenizer.json").write_bytes(byte_bpe((END, TURN)))
    settings = {"chat_template": TURNS + prompt, "eos_token": END}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "top_p": 0.5}))
    (tmp_path / "c.jsonl").write_text('{"prompt": "?", "answer": "ok"}\n' * 20)
    flags = {"init_from": base, "text": (tmp_path / "c.jsonl",), "seq_length": 24, "batch_size": 4, "max_iters": 30}
    flags |= {"checkpoint_every": 30, "lr": 0.02, "plots": False, "eval_every": 0, "dtype": "fp32"}
    lm.train(configure(lm.Config, **flags, device="cpu", outdir=tmp_path / "run"))
    capsys.readouterr()
    argv = ["--chat", "--prompt", "?", "--temperature", "0", "--max-new-tokens", "9"]
    assert cli.main(["sample", str(tmp_path / "run"), *argv]) == 0
    assert capsys.readouterr().out.strip() == "ok"
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    ends = [66, 257] if eos == 66 else [66, 256, 257]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == ends
    # A text that is no conversation has no turns.
    (tmp_path / "t").write_text("some words\n" * 60)
    flags |= {"text": (tmp_path / "t",), "batch_size": 1}
    assert 257 not in resolve(configure(lm.Config, **flags, device="cpu", outdir=tmp_path / "no run")).metadata.eos


def by_hand(record, tokenizer):
    """Tokens of a conversation up to --seq_length, and which are of answers."""
    ids, mask = [], []
    for message in json.loads(record)["messages"]:
        answer = message["role"] == "assistant"
        for text, counts in ((f"{message['role'][0]}:", False), (message["content"], answer)):
            ids += tokenizer.encode(text.encode()).tolist()
            mask += [counts] * len(text)
        ids += [*([256] if answer else []), *tokenizer.encode(b"\n").tolist()]
        mask += [*([True] if answer else []), False]
    return ids[: SMALL["seq_length"] + 1], mask[: SMALL["seq_length"] + 1]


def test_the_first_loss_is_the_mean_over_the_tokens_of_answers(folder, alone):
    """Of each conversation by itself, whose text is made by hand."""
    flags, outdir = alone
    weights = open_weights(folder / "hf")
    data = resolve(configure(lm.Config, **flags)).data
    batch = data.train.batch(0, 8, 0, 8)
    model = Transformer(config_of(weights)).double()
    model.load_state_dict({n: weights.read_full(n) for n in weights.entries})
    chats = [by_hand(record, data.tokenizer) for record in (folder / "chats.jsonl").read_text().splitlines()]
    starts = batch.documents.start_of_token if batch.documents is not None else torch.zeros_like(batch.inputs)
    total = count = 0
    for row, first in zip(batch.inputs, starts, strict=True):
        for start in first.unique():
            matches = row[first == start].tolist()
            # The conversation whose tokens these are, and padding behind it.
            of_one = []
            for ids, mask in chats:
                inputs = ids[:-1]
                padding = matches[len(inputs) :]
                if matches[: len(inputs)] == inputs and not any(padding):
                    of_one.append((ids, mask))
            assert of_one or not any(matches)
            for ids, mask in of_one[:1]:
                with torch.no_grad():
                    logits = model(torch.tensor([ids[:-1]]))[0][mask[1:]]
                total += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])[mask[1:]], reduction="sum")
                count += sum(mask[1:])
    # Every target is a token of an answer.
    assert count == int((batch.targets != -100).sum())
    assert curve(outdir)[0] == pytest.approx(float(total) / count, rel=1e-10)


def run(rank, outdir, flags):
    with program_on(rank):
        lm.train(configure(lm.Config, **flags, device="cpu", outdir=outdir))


def test_it_answers_by_its_template(alone, capsys):
    """Which the checkpoint has; the answer ends with its token."""
    weights = open_weights(alone[1])
    assert weights.metadata.chat.template == TEMPLATE
    assert weights.metadata.eos == (256,)
    command = ["sample", str(alone[1]), "--prompt", "ab", "--max-new-tokens", "12", "--seed", "1", "--dtype", "fp64"]
    assert cli.main([*command, "--chat"]) == 0
    answer = capsys.readouterr().out
    assert cli.main([*command[:3], "u:ab\na:", *command[4:]]) == 0
    assert capsys.readouterr().out == f"u:ab\na:{answer}"


@pytest.mark.long
@pytest.mark.parametrize("axes", [{"tpsize": 2}, {"pp": 2, "pack": True, "document_mask": True}], ids=str)
def test_a_run_goes_on(run_on_ranks, folder, tmp_path, axes):
    flags = flags_of(folder, **axes) | {"checkpoint_every": 3, "max_iters": 9}
    del flags["plots"]

    def go(name, *ends_at, **more):
        return run_on_ranks(
            train, 2, "mmm.trainer.lm", {**flags, **more, "outdir": tmp_path / name}, *ends_at, timeout=120
        )

    assert go("one") == [""] * 2
    assert go("two", 5) == ["ended"] * 2
    assert go("two", resume=Path("auto")) == [""] * 2
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    assert len(curve(tmp_path / "one")) == 9


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"document_mask": True}, ConfigError, "--document_mask"),
        ({"seq_length": 2}, DataError, "--seq_length 2"),
        ({"global_batch_size": 88}, DataError, "the data has 81 sequences of 48 tokens, fewer than one global batch"),
    ],
)
def test_refused(folder, more, error, message):
    with pytest.raises(error, match=message):
        resolve(configure(lm.Config, **flags_of(folder, **more)))
