"""Adapters of runs with ``--lora`` by PEFT: on the model of `transformers` they compute what the merged model does."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mmm.run.command_line import configure
from mmm.trainer import lm
from mmm.weights.open_weights import open_weights
from mmm.weights.weights import config_of
from mmm_lab.cli import main as cli
from support.llamas import CHARS, CONFIG, byte_bpe, write_hugging_face
from support.pages import program_with

pytestmark = pytest.mark.interop

FLAGS = {
    "lora": 3,
    "lora_alpha": 12.0,
    "seq_length": 24,
    "batch_size": 4,
    "max_iters": 4,
    "lr": 0.02,
    "dtype": "fp64",
    "checkpoint_every": 4,
    "eval_batches": 1,
    "plots": False,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def peft(transformers):
    # `make test-interop` installs it
    return pytest.importorskip("peft")


def in_float64(model):
    """A model of `transformers`, whose positions and norms are computed in float32 whatever its dtype is."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def table(x, position_ids):
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        angles = position_ids[..., None].double() * torch.cat((frequencies, frequencies))
        return angles.cos(), angles.sin()

    model.model.rotary_emb.forward = table
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            shape = module.weight.shape
            weight = module.weight
            eps = module.variance_epsilon
            module.forward = lambda x, shape=shape, weight=weight, eps=eps: F.rms_norm(x, shape, weight, eps)
    return model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("targets", [(), ("all-linear",)], ids=["q and v", "all"])
def test_peft_computes_the_logits_of_the_merged_model(transformers, peft, tmp_path, kind, targets):
    config = {**CONFIG, "model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
    config |= {"qwen3": {"head_dim": 16}, "mistral": {"sliding_window": 7}}.get(kind, {})
    write_hugging_face(tmp_path / "hf", config)
    (tmp_path / "text").write_text("".join(np.random.RandomState(0).choice(list(CHARS), 4000)))
    flags = {**FLAGS, "lora_targets": targets, "init_from": tmp_path / "hf", "text": (tmp_path / "text",)}
    lm.train(configure(lm.Config, **flags, outdir=tmp_path / "run"))
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "adapter"), "--adapter"]) == 0
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "merged")]) == 0

    def theirs(name):
        # Their own attention ("eager") has its softmax in float32.
        options = {"dtype": torch.float64, "attn_implementation": "sdpa"}
        return in_float64(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, **options))

    weights = open_weights(tmp_path / "run")
    model = weights.definition.build(config_of(weights)).double()
    model.load_state_dict({name: weights.read_full(name) for name in weights.entries})
    tokens = torch.arange(40).view(2, 20) * 7 % 67
    with torch.no_grad():
        ours = model(tokens)
        base = theirs("hf")
        before = base(tokens).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
        after = adapted(tokens).logits
        assert (after - before).abs().max() > 0.1
        torch.testing.assert_close(after, ours, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(theirs("merged")(tokens).logits, ours, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, ours, rtol=1e-10, atol=1e-10)


def test_the_page_loads_base_adapter_and_merged_model_in_a_process_of_its_own(run_page, tmp_path):
    """The last program of docs/fine-tune.md, for a small model in place of the page's."""
    write_hugging_face(tmp_path / "smollm2-hf", CONFIG)
    (tmp_path / "text").write_text("".join(np.random.RandomState(0).choice(list(CHARS), 4000)))
    flags = {**FLAGS, "init_from": tmp_path / "smollm2-hf", "text": (tmp_path / "text",)}
    lm.train(configure(lm.Config, **flags, outdir=tmp_path / "run"))
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "adapter"), "--adapter"]) == 0
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "merged")]) == 0
    compare = "import torch\ntokens = torch.arange(20)[None]\n"
    compare += "print(float((adapted(tokens).logits - merged(tokens).logits).abs().max()), len(base(tokens).logits))"
    difference, _ = run_page(program_with("fine-tune.md", "PeftModel.from_pretrained(base") + compare, tmp_path).split()
    assert float(difference) < 1e-3


def test_what_is_written_is_what_the_base_said(transformers, peft, tmp_path):
    """Through `mmm import`: PEFT finds the base by the adapter's own config, and the merged model keeps its length, its
    special tokens and how it is sampled."""
    write_hugging_face(tmp_path / "hf", {**CONFIG, "vocab_size": 260, "pad_token_id": 258, "bos_token_id": 256})
    (tmp_path / "hf" / "tokenizer.json").write_bytes(byte_bpe(("<s>", "</s>", "<p>", "<end>")))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(names))
    generation = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "do_sample": True, "top_p": 0.5}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    assert cli.main(["import", str(tmp_path / "hf"), "-o", str(tmp_path / "imported")]) == 0
    (tmp_path / "chats.jsonl").write_text('{"prompt": "?", "answer": "ok"}\n' * 20)
    flags = {**FLAGS, "seq_length": 40, "init_from": tmp_path / "imported", "text": (tmp_path / "chats.jsonl",)}
    lm.train(configure(lm.Config, **flags, outdir=tmp_path / "run"))
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "adapter"), "--adapter"]) == 0
    assert cli.main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "merged")]) == 0

    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "hf")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.max_position_embeddings == CONFIG["max_position_embeddings"]
    assert merged.generation_config.to_diff_dict() | generation == merged.generation_config.to_diff_dict()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
